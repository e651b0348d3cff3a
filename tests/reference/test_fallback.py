"""Reasons in their order, hysteresis, faults that nothing outranks, counters that add up."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference.errors import RefusedInput
from attnconform.reference.fallback import (
    PRIORITY,
    BatchFacts,
    Reason,
    SparsePath,
    choose_path,
    choose_paths,
    is_dense_now,
    reasons_of,
)

profiles.load_profile()

PATH = SparsePath(
    architectures=frozenset({"sm_90"}),
    dtypes=frozenset({"bfloat16"}),
    head_dims=frozenset({(128, 128), (64, 64)}),
    block_sizes=frozenset({16}),
    rules=frozenset({"Causal", "SoftCap"}),
    workspace_bytes=100,
    leave_above=Fraction(3, 4),
    enter_below=Fraction(1, 2),
)
SOUND = BatchFacts(
    architecture="sm_90",
    dtype="bfloat16",
    head_dim=(128, 128),
    block_size=16,
    rules=("Causal",),
    workspace_bytes=100,
    seqlens_kv=(7, 9),
    num_candidate_blocks=1,
    num_blocks=4,
    seconds=0.5,
)
MISFITS: dict[Reason, dict[str, object]] = {
    "architecture": {"architecture": "sm_80"},
    "dtype": {"dtype": "float32"},
    "head_dim": {"head_dim": (64, 128)},
    "block_size": {"block_size": 32},
    "rule": {"rules": ("Causal", "Document")},
    "workspace": {"workspace_bytes": 101},
    "dense_rate": {"num_candidate_blocks": 4},
}


def misfit(*reasons: Reason) -> BatchFacts:
    changed = {name: value for reason in reasons for name, value in MISFITS[reason].items()}
    return replace(SOUND, **changed)  # type: ignore[arg-type]


def test_there_are_seven_reasons_and_each_can_be_forced() -> None:
    assert tuple(MISFITS) == PRIORITY
    for reason in PRIORITY:
        decision = choose_paths([misfit(reason)], PATH).decisions[0]
        assert (decision.path, decision.reason) == ("fallback", reason)


@settings(max_examples=profiles.examples(100))
@given(st.sets(st.sampled_from(PRIORITY)))
def test_the_first_reason_by_priority_is_named(reasons: set[Reason]) -> None:
    decision = choose_paths([misfit(*reasons)], PATH).decisions[0]
    assert decision.reason == next((reason for reason in PRIORITY if reason in reasons), None)
    assert reasons_of(misfit(*reasons), PATH) == [r for r in PRIORITY if r in reasons and r != "dense_rate"]


def test_what_the_sparse_path_takes_it_runs_up_to_its_limits() -> None:
    assert choose_paths([SOUND, replace(SOUND, rules=())], PATH).records == ()


@settings(max_examples=profiles.examples(150))
@given(st.lists(st.integers(0, 8), max_size=12))
def test_between_the_thresholds_the_path_is_that_of_the_last_rate_outside(rates: list[int]) -> None:
    batches = [replace(SOUND, num_candidate_blocks=rate, num_blocks=8) for rate in rates]
    decisions = choose_paths(batches, PATH).decisions
    for i, decision in enumerate(decisions):
        outside = [rate for rate in rates[: i + 1] if rate > 6 or rate < 4]
        assert (decision.path == "fallback") == bool(outside and outside[-1] > 6)


def test_the_rate_moves_the_state_while_another_reason_decides_the_path() -> None:
    rises = replace(misfit("dtype"), num_candidate_blocks=4)
    between = replace(SOUND, num_candidate_blocks=5, num_blocks=8)
    reasons = [decision.reason for decision in choose_paths([between, rises, between], PATH).decisions]
    assert reasons == [None, "dtype", "dense_rate"]


def test_thresholds_that_cross_are_refused() -> None:
    crossed = replace(PATH, enter_below=Fraction(4, 5))
    with pytest.raises(RefusedInput, match=r"enter_below is 4/5.*\[FALLBACK-HYSTERESIS\]"):
        is_dense_now(Fraction(1, 2), crossed, was_dense=False)


@pytest.mark.parametrize("reasons", [(), ("head_dim",), PRIORITY])
def test_a_fault_is_refused_whatever_else_holds(reasons: tuple[Reason, ...]) -> None:
    faulty = replace(misfit(*reasons), fault="SAFE-OWNER")
    with pytest.raises(RefusedInput, match=r"\[SAFE-OWNER\]"):
        choose_path(faulty, PATH, is_dense=True)
    report = choose_paths([faulty, SOUND], PATH)
    assert [decision.path for decision in report.decisions] == ["refused", "sparse"]
    assert (report.counts, report.num_refused, report.request_share) == ({}, 1, 0.0)


def test_empty_rows_and_a_batch_without_tokens_decide_nothing() -> None:
    assert choose_paths([replace(SOUND, num_empty_rows=9)], PATH).decisions[0].path == "sparse"
    assert choose_paths([replace(SOUND, num_candidate_blocks=0, num_blocks=0)], PATH).decisions[0].path == "sparse"
    assert choose_paths([], PATH).request_share == 0.0


@settings(max_examples=profiles.examples(100))
@given(st.lists(st.tuples(st.sets(st.sampled_from(PRIORITY)), st.integers(1, 4), st.booleans()), max_size=8))
def test_records_and_counters_add_up(drawn: list[tuple[set[Reason], int, bool]]) -> None:
    batches = [
        replace(misfit(*reasons), seqlens_kv=(i,) * size, fault="SET-RANGE" if faulty else None, seconds=float(i))
        for i, (reasons, size, faulty) in enumerate(drawn)
    ]
    report = choose_paths(batches, PATH)
    fell = [(b, d) for b, d in zip(batches, report.decisions, strict=True) if d.path == "fallback"]
    assert [vars(r) for r in report.records] == [
        {"reason": d.reason, "seqlens_kv": b.seqlens_kv, "batch_size": len(b.seqlens_kv), "seconds": b.seconds}
        for b, d in fell
    ]
    assert sum(report.counts.values()) == len(fell)
    assert report.num_refused == sum(faulty for *_, faulty in drawn)
    ran = sum(size for _, size, faulty in drawn if not faulty)
    assert report.request_share == (sum(len(b.seqlens_kv) for b, _ in fell) / ran if ran else 0.0)
