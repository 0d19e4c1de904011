"""What a run in deterministic mode promises, how it is kept, the test that proves it and the control that must fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """One promise. ``test`` and ``control`` are ``path::function`` under ``tests/``; the control breaks the promise on
    purpose and asserts that it shows."""

    level: str
    promise: str
    kept_by: str
    test: str
    control: str


LEVELS = {
    "L0": "two runs of one launch are bitwise identical at every step",
    "L1": "a run stopped and resumed any number of times equals one that never stopped",
    "L2": "placement changes nothing: other machines, another ring, other algorithms of the transport, other timing",
    "L3": "one trajectory on any data-parallel size that divides the logical one, and on any pipeline",
    "L4": "the trajectory can be replayed on fewer GPUs",
}

PROMISES = (
    Promise(
        level="L0",
        promise="A second process repeats every bit",
        kept_by="ops with a stated guarantee, torch's switches, the environment below",
        test="determinism/test_controls.py::test_a_second_process_repeats_every_bit",
        control="determinism/test_controls.py::test_one_bit_of_one_weight_is_seen",
    ),
    Promise(
        level="L0",
        promise="Blocks, stacks and the model repeat forward, backward and the optimizer's step in one process, on "
        "every layout, however late ranks come and whatever other streams do (on GPUs: gpu/test_module_replay.py)",
        kept_by="nothing carries over from one step to the next but the state; generators are users' alone",
        test="determinism/test_module_replay.py::test_a_replay_has_the_same_bits_everywhere",
        control="determinism/test_module_replay.py::test_another_order_of_rows_in_one_op_is_seen_where_it_acts",
    ),
    Promise(
        level="L0",
        promise="Every variant of an op keeps its guarantee: repeats, and the same bits for every cut its spec lists",
        kept_by="op-catalog.md; a variant without a guarantee is not taken",
        test="ops/test_conformance.py::test_same_bits_in_every_run",
        control="ops/test_controls.py::test_an_unordered_sum_is_caught",
    ),
    Promise(
        level="L0",
        promise="Floating-point numbers of different ranks are added by ordered_reduce alone",
        kept_by="a gate on our sources, and a guard at run time on process groups' methods, where Python callers of "
        "torch.distributed end up, and before its functional collectives (callers in C++ that hold a process group, as "
        "DistributedDataParallel's reducer does, are not seen)",
        test="dist/test_float_sum_guard.py::test_float_sums_are_refused_whoever_asks_and_everything_else_is_not",
        control="architecture/test_rules.py::test_rule_sees_the_planted_breach",
    ),
    Promise(
        level="L0",
        promise="A bad value in the environment is refused by name, a missing one set, one that cannot act explained",
        kept_by="the table of variables below",
        test="unit/training/setup/test_pinned_environment.py::test_bad_value_is_refused_with_the_accepted_ones",
        control="unit/training/setup/test_determinism.py::"
        "test_called_too_late_it_says_what_has_started_and_changes_nothing",
    ),
    Promise(
        level="L0",
        promise="Copies of one weight stay equal bit for bit; a copy that drifts stops the run where it is watched",
        kept_by="the optimizer works on owned parts and copies travel as bytes; "
        "--check-weight-hash-across-dp-replicas-interval",
        test="dist/test_replicas.py::test_copies_stay_equal",
        control="dist/test_replica_watch.py::test_a_replica_that_drifts_stops_every_rank_and_is_named",
    ),
    Promise(
        level="L0",
        promise="Runs that differ in recipe, data, libraries, ops or device model are not compared; the difference is "
        "named",
        kept_by="the manifest's trajectory part; machines, their links and containers are in the launch part",
        test="unit/determinism/test_compare.py::test_another_device_library_or_op_is_named",
        control="unit/determinism/test_compare.py::test_another_machine_is_comparable",
    ),
    Promise(
        level="L1",
        promise="Resumed equals straight, at every kind of save",
        kept_by="fp32 masters, exact counts and positions in the checkpoint; everything else is derived",
        test="determinism/test_resume.py::test_resumed_is_straight",
        control="determinism/test_resume_controls.py::test_part_that_is_left_out_shows_elsewhere",
    ),
    Promise(
        level="L1",
        promise="A process killed while it saves loses nothing",
        kept_by="a checkpoint is complete or absent; the marker moves last",
        test="determinism/test_resume_killed.py::test_killed_saves_lose_nothing",
        control="unit/determinism/test_checkpoint.py::test_flipped_bit_is_named",
    ),
    Promise(
        level="L2",
        promise="Where ranks live and how long messages take changes no bit",
        kept_by="terms travel as copies and are added by position; blocks inside machines first is the same sum",
        test="determinism/test_placement.py::test_placement_and_delays_change_no_bit",
        control="determinism/test_placement.py::test_a_sum_in_another_order_gives_other_bits",
    ),
    Promise(
        level="L2",
        promise="On GPUs: devices permuted, NCCL's algorithm, protocol, channels and path, gloo in its place, several "
        "ranks a GPU, late ranks",
        kept_by="the same; NCCL moves bytes and integers only",
        test="gpu/test_placement_nccl.py::test_placement_changes_no_bit_and_a_backends_sum_does",
        control="gpu/test_placement_nccl.py::test_placement_changes_no_bit_and_a_backends_sum_does",
    ),
    Promise(
        level="L2",
        promise="Sums follow the stated order on any transport, in one stage or two",
        kept_by="the blocked fold",
        test="dist/test_ordered_reduce.py::test_inside_machines_first_has_the_bits_of_one_stage",
        control="determinism/test_placement.py::test_a_ring_that_starts_elsewhere_adds_differently",
    ),
    Promise(
        level="L2",
        promise="A sum over two members of one machine, which NCCL adds in transit, has the bits of the stated order",
        kept_by="two terms have one addition; fp32 has more than twice the digits of bf16 and fp16 and two, so "
        "rounding by way of it changes nothing",
        test="gpu/test_sum_of_two.py::test_nccl_adds_two_terms_as_stated",
        control="gpu/test_placement_nccl.py::test_placement_changes_no_bit_and_a_backends_sum_does",
    ),
    Promise(
        level="L2",
        promise="Overlap of gradient reduction, weight gather and pipeline transfers changes no bit, whoever is late; "
        "a gradient that comes after its bucket has left is refused by name",
        kept_by="buckets leave in the plan's order once complete; what is received is added by position; modules wait "
        "for their own weights",
        test="determinism/test_overlap.py::test_overlap_changes_no_bit",
        control="determinism/test_overlap.py::test_a_bucket_that_leaves_too_early_is_seen",
    ),
    Promise(
        level="L3",
        promise="Data-parallel and pipeline sizes, distributed optimizer and bucket sizes change no bit",
        kept_by="passes over logical shards and a fold that goes on from pass to pass",
        test="determinism/test_logical_data_parallel.py::test_one_trajectory",
        control="determinism/test_placement.py::test_a_fold_that_restarts_with_each_pass_gives_other_bits",
    ),
    Promise(
        level="L3",
        promise="Sizes may change at every resume, after saves of either kind",
        kept_by="the same, and checkpoints by global name and logical shard",
        test="determinism/test_layout_changes.py::test_one_trajectory_through_launches_of_other_sizes",
        control="determinism/test_layout_changes.py::test_a_size_that_does_not_divide_the_logical_one_is_refused",
    ),
    Promise(
        level="L3",
        promise="A backend's sum, as elsewhere, is another trajectory on another number of ranks; ours is one",
        kept_by="the same",
        test="determinism/test_placement.py::test_a_backends_sum_follows_the_number_of_ranks",
        control="determinism/test_placement.py::test_a_backends_sum_follows_the_number_of_ranks",
    ),
    Promise(
        level="L3",
        promise="A parameter of first and last stage has the bits of one stage",
        kept_by="two gradient buffers at every pipeline size, added first + last",
        test="dist/test_engine_pipeline.py::test_any_pipeline_equals_one_stage",
        control="dist/test_engine_pipeline.py::test_another_order_of_microbatches_gives_other_bits",
    ),
    Promise(
        level="L3",
        promise="Bucket sizes change no bit",
        kept_by="every logical shard starts at a multiple of 1,024 elements, and so does every cut",
        test="dist/test_engine_reduction.py::test_bucket_sizes_do_not_change_a_bit",
        control="dist/test_engine_reduction.py::test_another_block_gives_other_bits",
    ),
    Promise(
        level="L3",
        promise="The gradient's norm does not depend on how it is cut",
        kept_by="fp64 sums of fixed blocks, added exactly as integers",
        test="ops/test_norm_blocks.py::test_any_cut_at_blocks_in_any_order_gives_the_same_norm",
        control="ops/test_norm_blocks.py::test_fp64_sums_of_pieces_would_depend_on_the_cut",
    ),
    Promise(
        level="L3",
        promise="Expert biases follow exact counts over all passes and ranks",
        kept_by="int64 counts, compared as integers",
        test="dist/test_engine_expert_bias.py::test_bias_follows_integer_counts_of_the_whole_stage",
        control="dist/test_engine_expert_bias.py::test_counts_in_floating_point_would_lose_the_difference",
    ),
    Promise(
        level="L4",
        promise="A step of eight ranks can be repeated on one that holds the state, resumed on the way",
        kept_by="L1 and L3 together; the logical layout is in the checkpoint",
        test="dist/test_checkpoint_layouts.py::test_steps_go_on_alike_on_another_pipeline_and_data_parallel_size",
        control="dist/test_checkpoint_layouts.py::test_another_logical_layout_is_refused_with_both",
    ),
)
