"""Optax transformations: steepest directions, budgets and retractions for trees of parameters.

A geometry gives the manifold of each parameter; transformations apply it leaf by leaf. With a
geometry they need `params` in `update`.
"""

from manifoldmuon._internal.trees.paths import by_path
from manifoldmuon.optim import rules as rules
from manifoldmuon.optim._agd import agd, init_semi_orthogonal
from manifoldmuon.optim._aliases import adamh, manifold_muon, muon, muonh
from manifoldmuon.optim._budget import Budgets as Budgets
from manifoldmuon.optim._budget import scale_by_budget
from manifoldmuon.optim._chain import chain, check_chain
from manifoldmuon.optim._descend import descend
from manifoldmuon.optim._execute import map_leaves
from manifoldmuon.optim._geometry import Geometry as Geometry
from manifoldmuon.optim._geometry import resolve_geometry
from manifoldmuon.optim._hybrid import hybrid
from manifoldmuon.optim._hyperball import hyperball
from manifoldmuon.optim._keep_norms import keep_norms, match_norms
from manifoldmuon.optim._links import project_tangent, retract, scale_by_steepest
from manifoldmuon.optim._master_copies import with_master_copies
from manifoldmuon.optim._modular import Architecture as Architecture
from manifoldmuon.optim._modular import modular, normed
from manifoldmuon.optim._monitor import monitor, monitor_distance, monitor_scalars
from manifoldmuon.optim._normalize import normalize
from manifoldmuon.optim._optax_muon import optax_muon
from manifoldmuon.optim._riemannian import riemannian_adam, riemannian_sgd
from manifoldmuon.optim._start import start_anywhere, start_on
from manifoldmuon.optim._tabulate import Table as Table
from manifoldmuon.optim._tabulate import tabulate
from manifoldmuon.optim._transformation import transformation
from manifoldmuon.optim._trees import init_tree, project_tree

__all__ = [
    "adamh",
    "agd",
    "by_path",
    "chain",
    "check_chain",
    "descend",
    "hybrid",
    "hyperball",
    "init_semi_orthogonal",
    "keep_norms",
    "init_tree",
    "manifold_muon",
    "map_leaves",
    "match_norms",
    "modular",
    "monitor",
    "monitor_distance",
    "monitor_scalars",
    "muon",
    "muonh",
    "normalize",
    "normed",
    "optax_muon",
    "project_tangent",
    "project_tree",
    "resolve_geometry",
    "retract",
    "riemannian_adam",
    "riemannian_sgd",
    "rules",
    "scale_by_budget",
    "scale_by_steepest",
    "start_anywhere",
    "start_on",
    "tabulate",
    "transformation",
    "with_master_copies",
]
