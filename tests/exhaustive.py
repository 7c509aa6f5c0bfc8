"""What the suite leaves out unless it is run with `--exhaustive`, as `.ci/run` does.

Cases that differ from those that stay in a shape, a norm or a kind of optimizer, and whole programs
whose parts have tests of their own: half of the time, for the last few of the faults. A file that
is named alone is left as short; a test that is named by `::` runs with all its cases.
"""

import pytest

# The cases that stay, by test.
STAY: dict[str, tuple[str, ...]] = {
    "bounds/test_lengths.py::test_no_step_of_the_weights_moves_more_than_the_bound": (),
    "bounds/test_networks.py::test_no_attack_exceeds_the_bounds": ("MLP", "attention"),
    "bounds/test_rules.py::test_no_attack_exceeds_the_bound": (
        "ReLU",
        "Softmax",
        "attention",
        "RMSDivide",
        "MeanSubtract",
        "Mul",
        "GELU",
        "AttendValues",
    ),
    "studies/test_step_lengths.py::test_automatic_gradient_descent_learns_beside_adam": (),
    "studies/test_bounds.py::test_attacks_stay_below_the_bounds": (),
    "studies/test_proof.py::test_an_attack_that_breaks_a_certified_image_ends_the_run": (),
    "studies/test_proof.py::test_a_run_ends_with_a_table_a_picture_and_a_proof": (),
    "studies/test_digits_checkpoint.py::"
    "test_a_full_disk_is_told_once_and_the_results_are_there": (),
    "studies/test_digits_checkpoint.py::test_a_killed_job_goes_on_to_the_same_bits": (),
    "examples/test_frameworks.py::test_a_program_trains": ("plain",),
    "studies/test_gpt.py::test_constrained_weights_are_on_their_manifolds_and_learn": (),
    "studies/test_gpt.py::test_the_command_writes_a_record_and_goes_on_with_it": (),
    "studies/test_gpt.py::test_the_published_protocol_step_by_step": (),
    "studies/test_reproduction.py::test_weight_erasure_goes_on_where_it_stopped": (),
    "studies/test_digits.py::test_mnist_from_a_folder": (),
    "lab/test_retractions.py::test_the_slope_is_one_more_than_the_order": (
        "Stiefel-Polar(max_iterations=20)-3",
        "Stiefel-QR()-2",
    ),
    "lab/test_retractions.py::test_without_retraction_a_walk_grows_as_pythagoras_says": (),
    "linalg/test_derivative.py::"
    "test_an_eigenvector_does_not_turn_towards_those_that_tie_with_it": (),
    "linalg/test_derivative.py::test_functions_with_loops_have_derivatives_of_any_order": (
        "a Lyapunov equation",
        "a balanced matrix",
    ),
    "linalg/test_laws.py::test_a_stack_of_wide_matrices": (
        "default",
        "muon",
        "inverse root",
        "svd",
    ),
    "manifolds/test_derivatives.py::test_at_a_zero_gradient_both_modes_are_finite_and_agree": (
        "flat vector",
        "sphere of a matrix",
        "embedding rows",
        "orthogonal by svd",
        "stiefel wide, scaled",
        "isospectral tall",
        "spectral sphere",
        "spectral ball",
    ),
    "manifolds/solvers/test_iterations.py::"
    "test_a_solver_stops_early_near_the_answer_of_its_full_budget": ("admm",),
    "manifolds/solvers/test_solvers.py::test_a_gradient_that_is_almost_normal_to_the_manifold": (
        "shape0-skew lift",
        "shape0-one step",
        "shape0-resolvents",
        "shape0-one step of accelerators",
        "shape1-skew lift",
        "shape1-resolvents",
    ),
    "manifolds/solvers/test_solvers.py::test_direction_is_feasible_and_its_gap_is_a_true_bound": (
        "shape0-resolvents",
        "shape0-one step",
        "shape0-skew lift",
        "shape0-dual ascent",
        "shape0-fixed point",
        "shape0-admm",
        "shape0-alternating",
        "shape1-resolvents",
        "shape1-skew lift",
    ),
    "manifolds/solvers/test_solvers.py::test_resolvents_of_several_blocks": ("shape0",),
    "manifolds/solvers/test_solvers.py::test_stacks_are_solved_in_parts": ("4",),
    "manifolds/solvers/test_solvers.py::test_wide_matrices_are_transposes_of_tall_ones": (
        "shape0-resolvents",
        "shape0-one step",
        "shape0-skew lift",
        "shape1-one step",
    ),
    "manifolds/test_broken.py::test_a_broken_manifold_is_found": (
        "OffTheSet",
        "GapTooSmall",
        "NotTangent",
        "MixesCopies",
        "SwallowsNaN",
    ),
    "manifolds/test_closed_forms.py::test_the_nearest_matrix_of_given_sums": (
        "0.1-(4, 7)",
        "1.0-(6, 3)",
        "30.0-(3, 3)",
    ),
    "manifolds/test_closed_forms.py::test_training_on_each_set": (),
    "manifolds/test_derivatives.py::test_reverse_mode_through_a_step_is_the_slope_of_differences": (
        "spectral sphere",
        "band, at both edges",
        "balanced",
    ),
    "manifolds/test_fast.py::test_certificates_say_what_it_costs": (
        "Stiefel-",
        "Hypersphere-",
        "Euclidean-0",
        "SpectralSphere-",
    ),
    "manifolds/test_laws.py::test_manifold_laws": (
        "flat vector",
        "flat muon",
        "sphere of a matrix",
        "embedding rows",
        "rows by spectral steps",
        "stiefel tall",
        "stiefel square",
        "orthogonal odd stack",
        "grassmann tall",
        "isospectral tall",
        "spheres of radius 3",
        "spectral ball",
    ),
    "manifolds/test_laws.py::test_manifold_laws_in_float64": (
        "stiefel wide, scaled",
        "embedding rows",
    ),
    "manifolds/test_laws.py::test_slopes_of_retraction_and_gradient": (
        "sphere of a matrix",
        "stiefel wide, scaled",
        "fixed sums by Sinkhorn and Frobenius steps",
        "isospectral tall",
        "spectral sphere",
    ),
    "manifolds/test_optima.py::test_gradients_without_a_direction": (
        "0.0-fixed Frobenius",
        "normal-band",
        "nan-ball",
    ),
    "manifolds/test_optima.py::test_optimum": (
        "fixed rows-spectral-(6, 4)",
        "spectral sphere-spectral-(3, 5)",
        "ball-spectral-(6, 4)",
        "band-spectral-(6, 4)",
        "spectral sphere-infinity-(6, 4)",
        "fixed rows-frobenius-(6, 4)",
    ),
    "manifolds/test_optima.py::test_rows_at_training_prices": (),
    "manifolds/test_points.py::test_flat_random_points_have_norm_one": (),
    "manifolds/test_retractions.py::test_no_drift_over_three_thousand_steps": ("(64, 10)",),
    "manifolds/test_retractions.py::test_reverse_mode_through_a_soft_cap": (),
    "manifolds/test_training.py::test_a_fit": ("ball",),
    "modules/test_atoms.py::test_atoms_are_well_normed": (),
    "modules/test_lipschitz.py::test_atoms_are_well_normed": (),
    "modules/test_rules.py::test_norms_are_those_of_the_recursion": (),
    "modules/test_rules.py::test_steps_are_those_of_the_recursion": (),
    "norms/test_laws.py::test_norm_laws": (
        "embedding",
        "frobenius matrix",
        "spectral wide stack",
        "infinity",
    ),
    "optim/test_agd.py::test_is_a_good_citizen": (),
    "optim/test_cautious.py::test_on_a_constrained_manifold_the_step_stays_tangent": ("manifold0",),
    "optim/test_chain.py::test_chain_refuses_links_after_a_nested_retract": (
        "partition",
        "inject_hyperparams",
    ),
    "optim/test_citizenship.py::test_is_a_good_citizen": (
        "manifold_muon",
        "muon",
        "normalize-others",
        "retract",
        "steepest-edges",
    ),
    "optim/test_combination.py::test_no_step_of_norm_one_does_better": ("Sum()",),
    "optim/test_combination.py::test_on_a_mesh": (),
    "optim/test_combination.py::test_the_alias_takes_the_combination": (),
    "optim/test_free.py::test_derivatives_pass_through_the_line_search": (),
    "optim/test_nnx.py::test_it_takes_the_steps_of_an_optax_loop": ("manifold_muon",),
    "optim/test_normalize.py::test_every_point_has_its_budget_for_a_norm": (),
    "optim/test_normalize.py::test_rounding_in_the_gradient_does_not_grow": (),
    "optim/test_owners.py::test_counts_that_do_not_divide": ("9",),
    "optim/test_owners.py::test_every_device_does_its_share": ("muon-replicated",),
    "optim/test_owners.py::test_explicit_axes": (),
    "optim/test_owners.py::test_steps_are_scanned_and_accumulated": (),
    "optim/test_riemannian.py::test_float64_keeps_its_digits": (),
    "optim/test_riemannian.py::test_steps_are_those_of_a_loop_in_float64": ("adam",),
    "optim/test_sharding.py::test_every_function_of_a_tree_on_a_mesh": (
        "distance_tree-explicit-outside",
        "monitor_distance, flat-explicit-inside",
        "init_tree-explicit-inside",
        "retract-automatic-inside, mesh set",
        "riemannian_sgd-explicit-outside",
    ),
    "optim/test_sharding.py::test_sharded_parameters_take_the_same_steps": ("both",),
    "optim/test_sharding.py::test_tangent_parts_of_sharded_parameters": (),
    "optim/test_sharding.py::test_trees_on_an_explicit_mesh": (),
    "optim/test_strict.py::test_learning_rate_and_momentum_can_be_learned": ("muon",),
    "optim/test_strict.py::test_strict_modes_do_not_trip_us": ("muon", "normalize", "retract"),
    "optim/test_wrappers.py::test_wrappers_that_leave_the_set_are_found": (
        "schedule_free",
        "mechanize",
        "reduce_on_plateau behind",
    ),
    "optim/test_wrappers.py::test_wrappers_that_stay_on_the_set": (
        "partition",
        "sam, at the end of a period",
        "reduce_on_plateau in front",
        "prodigy",
        "schedule_free, mended",
    ),
    "robustness/test_certificates.py::test_no_movement_within_the_radius_changes_a_label": (),
    "robustness/test_export.py::test_a_network_of_images_is_certified": (),
    "studies/test_certified_networks.py::"
    "test_a_training_learns_on_its_manifold_and_holds_what_it_certifies": (),
    "studies/test_certified_networks.py::test_networks_keep_lengths_up_to_the_last_layers": (
        "architecture0",
    ),
    "studies/test_cifar.py::test_a_real_cifar_archive_is_read": (),
    "studies/test_datasets.py::test_the_real_mnist_passes_its_check": (),
    "studies/test_erasure.py::test_table_and_picture_need_nothing_but_the_record": (),
    "studies/test_erasure.py::test_what_training_does_to_the_letter": (),
    "studies/test_retractions.py::test_the_whole_on_one_manifold": (),
    "studies/test_solvers.py::test_the_whole_on_one_layer": (),
    "test_benchmarks.py::test_growth_is_measured_along_its_axes": (),
    "test_docs.py::test_a_tutorial_runs": (),  # the build of the documentation runs them, too
    "test_docs.py::test_the_code_on_a_page_runs": ("README.md", "docs/getting-started.md"),
    "test_passes.py::test_a_walk_stays_on_the_manifold_to_float32": ("float32",),
    "test_xla_defaults.py::test_laws_with_optimised_programs": ("stiefel wide, scaled",),
    "test_reliability.py::test_a_splitting_that_fails_gives_way_to_the_tangent_part": (),
    "test_reliability.py::test_trainings": ("manifold_muon",),
    "test_reliability.py::test_warm_starts_with_sparse_and_switching_gradients": (
        "Stiefel, ADMM",
        "normalized momentum",
    ),
    "test_reliability.py::test_what_random_cases_have_found": (),
    "test_shard_map.py::test_directions_and_retractions": (
        "sphere by great circles",
        "rows by spectral steps",
        "spectral ball",
        "doubly stochastic",
    ),
    "test_shard_map.py::test_every_device_steps_as_if_alone": (),
}


UNKNOWN = pytest.StashKey[list[str]]()


def split(
    items: list[pytest.Item],
) -> tuple[list[pytest.Item], list[pytest.Item], list[str]]:
    """The items that stay, those that are left out, and what `STAY` names and their files lack."""
    stay, left_out, seen = [], [], set()
    for item in items:
        test, _, case = item.nodeid.removeprefix("tests/").partition("[")
        case = case.removesuffix("]")
        seen |= {test.split("::")[0], test, f"{test}[{case}]"}
        (stay if test not in STAY or case in STAY[test] else left_out).append(item)
    unknown = []
    for test, cases in STAY.items():
        if test.split("::")[0] in seen:
            names = [test, *(f"{test}[{case}]" for case in cases)]
            unknown += [name for name in names if name not in seen]
    return stay, left_out, unknown
