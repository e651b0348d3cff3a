"""The backward suites on tiny shapes in the interpreter: answers, parts and plots; never their times."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnconform.conformance.bench import acceptance, backward, backward_subjects, backward_training, backward_tuning
from attnconform.conformance.bench.acceptance_small import Check, count, differs, equal, near
from attnconform.conformance.bench.backward_parts import ROWS, TRANSPOSE
from attnconform.conformance.bench.backward_subjects import HotShape, hot_pages
from attnconform.conformance.bench.honesty import ERROR_BOUND
from attnconform.conformance.bench.machine import TimeUp
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.flex_backward import flex_blocks_backward

QUICK = BenchOptions(seconds=0.1)
SMALL_HOT = HotShape(4, 1, 1, 3, 16, 2, 1, 16, torch.float32)


@pytest.fixture(scope="module")
def hot(machine):
    return hot_pages(machine, SMALL_HOT)


@pytest.fixture(scope="module")
def rows(hot, machine):
    return {row.stage: row for row in backward.subject_rows(hot, machine, QUICK)}


def test_every_mode_has_a_row_and_the_planning_its_own(rows):
    assert set(rows) == {"backward kv_centric", "backward hybrid", "backward atomic", TRANSPOSE}
    assert all(rows[f"backward {mode}"].error <= ERROR_BOUND for mode in ("kv_centric", "hybrid", "atomic"))
    assert "2 runs bit-equal" in rows["backward kv_centric"].path
    assert "repeats bit for bit" in rows["backward kv_centric"].path
    assert "order moves dk, dv by" in rows["backward atomic"].path


def test_parts_are_timed_apart(rows):
    always = {TRANSPOSE, ROWS, "clear"}
    assert set(rows["backward kv_centric"].kernels) == always | {"dq", "dk, dv"}
    assert set(rows["backward atomic"].kernels) == always | {"dq and cold dk, dv", "round dk, dv"}
    assert all(time > 0 for row in rows.values() for time in row.kernels.values())


def test_a_backward_row_counts_five_products_and_its_own_workspace(rows, hot):
    row = rows["backward atomic"]
    assert row.figures.flops_useful == 5 * 2 * 16 * 4 * 2 * 32
    # Sums of three pages at most, beside lse and delta of four rows and two heads.
    assert 2 * 4 * 4 * 2 < row.figures.workspace_used <= 2 * 4 * 4 * 2 + 3 * 16 * 32 * 4 + 4 * 8 * 16 * 16
    assert rows["backward kv_centric"].figures.workspace_used < row.figures.workspace_used


def test_all_subjects_are_made_and_named_apart():
    machine = SimpleNamespace(is_real=True, device="meta")
    assert len(list(backward_subjects.subjects(machine))) == 10


def test_a_hot_page_is_read_by_every_row_and_the_others_are_not(hot):
    positions = hot.plan.list_positions.view(4, -1).cpu()
    assert torch.equal(positions[:, :16], torch.arange(16).int().expand(4, -1))
    assert (positions[:, 16:] >= 16).all()
    assert np.all(hot.lengths == 32)


def test_flex_over_blocks_says_that_a_cpu_has_no_backward(machine):
    with pytest.raises(ValueError, match="FlexAttention has no backward on a CPU"):
        flex_blocks_backward(SimpleNamespace(), torch.empty(0), machine)


def test_thresholds_run_from_all_gathered_to_all_added(hot, machine, monkeypatch, numbers, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(backward_tuning, "TINY_THRESHOLDS", (1, 1 << 20))
    found = list(backward_tuning.threshold_rows(hot, machine, QUICK))
    gathered, added = found
    assert gathered.kernels[backward_tuning.GATHERING] > 0
    assert added.kernels[backward_tuning.GATHERING] == 0
    assert added.kernels[backward_tuning.ADDING] > 0
    assert added.figures.workspace_used > gathered.figures.workspace_used
    report = numbers.report(*found, is_interpreted=True)
    assert [r0 for r0, _ in backward_tuning.thresholds_of(report)] == [1, 1 << 20]
    assert backward_tuning.crossing_threshold(report) in (1, 1 << 20)
    backward_tuning.draw_thresholds(report, tmp_path / "deep" / "r0.png")
    assert (tmp_path / "deep" / "r0.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_without_thresholds_says_what_it_has(numbers):
    with pytest.raises(ValueError, match="the report has 1 rows, but none of suite backward-tuning with a threshold"):
        backward_tuning.thresholds_of(numbers.report(numbers.row()))


def test_shapes_are_swept_one_direction_at_a_time(hot, machine, monkeypatch):
    monkeypatch.setattr(backward_tuning, "TINY_SHAPES", ((16, 16, 4, 1),))
    found = {row.stage: row.path for row in backward_tuning.shape_rows(hot, machine, QUICK)}
    assert set(found) == {"backward dq 16x16 warps 4 stages 1", "backward dk, dv 16x16 warps 4 stages 1"}
    assert "dq 16x16 warps 4 stages 1" in found["backward dq 16x16 warps 4 stages 1"]


def test_a_shape_that_does_not_fit_is_told_and_the_next_is_timed(hot, machine, monkeypatch):
    monkeypatch.setattr(backward_tuning, "TINY_SHAPES", ((16, 16, 4, 1), (16, 32, 4, 1)))
    whole, notes = backward_tuning.time_whole, []

    def no_room_for_wide(ours, *rest):
        if "16x32" in ours.path:
            raise RuntimeError("out of resource: shared memory")
        return whole(ours, *rest)

    monkeypatch.setattr(backward_tuning, "time_whole", no_room_for_wide)
    found = list(backward_tuning.shape_rows(hot, machine, replace(QUICK, tell=notes.append)))
    assert [row.stage for row in found] == [
        "backward dq 16x16 warps 4 stages 1",
        "backward dk, dv 16x16 warps 4 stages 1",
    ]
    assert len(notes) == 2
    assert notes[0].endswith("backward dq 16x32 warps 4 stages 1: RuntimeError: out of resource: shared memory")


def test_the_tuning_in_parts_asks_for_what_it_asks_for_in_one(hot, machine):
    found = list(backward_tuning.lines(machine))
    titles = {line.title for line in found}
    assert len(titles) == len(found) == 1 + 2 * len(list(backward_tuning.choices(machine)))
    stage, hints = next(backward_tuning.choices(machine))
    [row] = backward_tuning.choice_rows(lambda m: hot, stage, hints, machine, QUICK)
    assert (row.suite, row.stage) == (backward_tuning.SUITE, stage)


def test_kernel_layer_and_step_are_three_levels_and_the_step_learns(machine):
    rows = {row.stage: row for row in backward_training.training_rows(machine, QUICK)}
    assert list(rows) == ["kernel", "layer", "training step"]
    assert all(row.dense is not None for row in rows.values())
    assert "it does not fall" not in rows["training step"].path


def test_checks_tell_right_from_wrong():
    right, wrong = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1])
    nan = torch.tensor([1.0, torch.nan])
    for made, is_met in (
        (near("x", right, right), True), (near("x", wrong, right), False), (near("x", nan, right), False),
        (equal("x", right, right), True), (equal("x", wrong, right), False), (equal("x", nan, right), False),
        (count("x", 3, 3), True), (count("x", 2, 3), False),
        (differs("x", wrong, right), True), (differs("x", right, right), False),
    ):  # fmt: skip
        assert made.is_met == is_met
        assert made.line.startswith("met: x" if is_met else "NOT MET: x")


def test_the_acceptance_scenario_is_met_at_a_small_length(machine, monkeypatch):
    """The first parts of it; the script runs them all."""
    parts = {name: acceptance.PARTS[name] for name in ("adjacency", "block statistics", "reuse")}
    monkeypatch.setattr(acceptance, "PARTS", parts)
    told = []
    found = acceptance.accept(machine, told.append)
    assert found.is_met, [check.line for check in found.checks]
    assert told[0] == acceptance.NOT_LONG
    assert len(found.checks) == 9


def test_an_acceptance_that_the_limit_cuts_off_is_not_met(machine, monkeypatch):
    late = replace(machine, deadline=0.0)
    told = []
    found = acceptance.accept(late, told.append)
    assert not found.is_met
    assert found.checks == []
    assert found.left_out == list(acceptance.PARTS)
    assert told[-1] == "serving: the limit was reached"


@pytest.mark.parametrize("rows", [backward.backward_rows, backward_tuning.tuning_rows, backward_training.training_rows])
def test_no_suite_begins_a_work_past_its_limit(machine, rows):
    with pytest.raises(TimeUp):
        list(rows(replace(machine, deadline=0.0), QUICK))


def test_a_mask_that_joins_documents_is_not_accepted(machine, monkeypatch):
    """The same prompt with the documents left out of its rule."""
    import attnconform.kernels.sparse_attention.rules as rules
    from attnconform.conformance.bench.prefill_work import PrefillWork

    monkeypatch.setattr(
        PrefillWork, "mask_rule", lambda work: rules.And((rules.Causal(), rules.Window(work.window - 1)))
    )
    checks: list[Check] = list(acceptance.PARTS["adjacency"](acceptance.SMALL, machine))
    assert not any(check.is_met for check in checks)
