"""Optax transformations: steepest directions, budgets and retractions for trees of parameters.

A geometry says which manifold each parameter lives on; the links of a chain use it leaf by leaf.
"""

from manifoldmuon.optim._agd import ScaleByAGDState, agd, init_semi_orthogonal, scale_by_agd
from manifoldmuon.optim._aliases import manifold_muon, muon, normuon, scion
from manifoldmuon.optim._budget import scale_by_budget
from manifoldmuon.optim._cautious import cautious
from manifoldmuon.optim._decay import add_cautious_weight_decay, add_decay_towards
from manifoldmuon.optim._geometry import ByFunction, ByPath, by_path, path_string, resolve
from manifoldmuon.optim._master_copies import MasterCopiesState, with_master_copies
from manifoldmuon.optim._modular import Architecture, modular, normed
from manifoldmuon.optim._normalize import NormalizeState, normalize
from manifoldmuon.optim._normuon import ScaleByNeuronRMSState, scale_by_neuron_rms
from manifoldmuon.optim._qk_clip import with_qk_clip
from manifoldmuon.optim._retract import chain, check_chain, retract
from manifoldmuon.optim._riemannian import riemannian_adam, riemannian_sgd
from manifoldmuon.optim._steepest import (
    ScaleBySteepestState,
    monitor,
    scale_by_duality,
    scale_by_steepest,
)
from manifoldmuon.optim._step_by_distance import StepByDistanceState, step_by_distance
from manifoldmuon.optim._step_by_line_search import StepByLineSearchState, step_by_line_search
from manifoldmuon.optim._step_by_rule import (
    DeepTrust,
    SquareLossSmoothness,
    StepByRuleState,
    StepRule,
    step_by_rule,
)
from manifoldmuon.optim._tabulate import Table, TableRow, tabulate
from manifoldmuon.optim._tangent import project_tangent
from manifoldmuon.optim._trees import distance_tree, init_tree, monitor_distance, project_tree

__all__ = [
    "Architecture",
    "ByFunction",
    "ByPath",
    "DeepTrust",
    "MasterCopiesState",
    "NormalizeState",
    "ScaleByAGDState",
    "ScaleByNeuronRMSState",
    "ScaleBySteepestState",
    "SquareLossSmoothness",
    "StepByDistanceState",
    "StepByLineSearchState",
    "StepByRuleState",
    "StepRule",
    "Table",
    "TableRow",
    "add_cautious_weight_decay",
    "add_decay_towards",
    "agd",
    "by_path",
    "cautious",
    "chain",
    "check_chain",
    "distance_tree",
    "init_semi_orthogonal",
    "init_tree",
    "manifold_muon",
    "modular",
    "monitor",
    "monitor_distance",
    "muon",
    "normalize",
    "normed",
    "normuon",
    "path_string",
    "project_tree",
    "resolve",
    "retract",
    "riemannian_adam",
    "riemannian_sgd",
    "scale_by_agd",
    "scale_by_budget",
    "scale_by_duality",
    "scale_by_neuron_rms",
    "scale_by_steepest",
    "scion",
    "step_by_distance",
    "step_by_line_search",
    "step_by_rule",
    "tabulate",
    "project_tangent",
    "with_master_copies",
    "with_qk_clip",
]
