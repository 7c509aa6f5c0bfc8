"""Optax transformations: steepest directions, budgets and retractions for trees of parameters.

A geometry says which manifold each parameter lives on; the links of a chain use it leaf by leaf.
"""

from manifoldmuon.optim._agd import ScaleByAGDState, agd, scale_by_agd
from manifoldmuon.optim._aliases import manifold_muon, muon
from manifoldmuon.optim._budget import scale_by_budget
from manifoldmuon.optim._chain import chain, check_chain
from manifoldmuon.optim._combination import Combination, Max, RootSumSquares, Sum
from manifoldmuon.optim._duality import scale_by_duality
from manifoldmuon.optim._fans import Fans, init_semi_orthogonal
from manifoldmuon.optim._geometry import resolve
from manifoldmuon.optim._modular import Architecture, modular, normed
from manifoldmuon.optim._monitor import monitor
from manifoldmuon.optim._normalize import NormalizeState, normalize
from manifoldmuon.optim._paths import ByPath, by_path, path_string
from manifoldmuon.optim._retract import retract
from manifoldmuon.optim._steepest import ScaleBySteepestState, scale_by_steepest
from manifoldmuon.optim._step_by_distance import StepByDistanceState, step_by_distance
from manifoldmuon.optim._step_by_line_search import StepByLineSearchState, step_by_line_search
from manifoldmuon.optim._step_by_rule import StepByRuleState, step_by_rule
from manifoldmuon.optim._step_rules import DeepTrust, SquareLossSmoothness, StepRule
from manifoldmuon.optim._trees import distance_tree, init_tree, monitor_distance, project_tree

__all__ = [
    "Architecture",
    "ByPath",
    "Combination",
    "DeepTrust",
    "Fans",
    "Max",
    "NormalizeState",
    "RootSumSquares",
    "ScaleByAGDState",
    "ScaleBySteepestState",
    "SquareLossSmoothness",
    "StepByDistanceState",
    "StepByLineSearchState",
    "StepByRuleState",
    "StepRule",
    "Sum",
    "agd",
    "by_path",
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
    "path_string",
    "project_tree",
    "resolve",
    "retract",
    "scale_by_agd",
    "scale_by_budget",
    "scale_by_duality",
    "scale_by_steepest",
    "step_by_distance",
    "step_by_line_search",
    "step_by_rule",
]
