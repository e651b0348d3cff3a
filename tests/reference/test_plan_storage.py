"""Capacities, task storage that is planned again, index storage of runs in flight."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.conformance.judge.plan_structures import entries_of, storage_fault
from attnconform.reference.errors import RefusedInput
from attnconform.reference.plan_storage import (
    WAIT,
    Sizes,
    StorageEvent,
    TaskStorage,
    check_capacity,
    plan_each,
    replay_storage,
)
from attnconform.reference.task_table import build_task_table

profiles.load_profile()

CAPACITY = Sizes(batch_size=4, num_rows=8, num_entries=128, num_splits=2, workspace_bytes=1024)
LAYERS = st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=5)


@pytest.mark.parametrize("name", [field.name for field in fields(Sizes)])
def test_one_more_of_anything_is_refused_and_the_capacity_itself_fits(name: str) -> None:
    check_capacity(CAPACITY, CAPACITY)
    need = replace(CAPACITY, **{name: getattr(CAPACITY, name) + 1})
    with pytest.raises(RefusedInput, match=rf"{name} is .*\[PLAN-CAPACITY\]"):
        check_capacity(need, CAPACITY)


@settings(max_examples=profiles.examples(150))
@given(LAYERS, st.integers(1, 4))
def test_a_plan_runs_what_a_fresh_one_runs_or_what_it_ran_before_a_refusal(
    layers: list[list[int]], target: int
) -> None:
    indptrs = [np.cumsum([0, *layer]) for layer in layers]
    standing: dict[int, list[int]] = {}
    for indptr, planned in zip(indptrs, plan_each(indptrs, target=target, capacity=6), strict=True):
        fresh = build_task_table(indptr, target=target)
        assert planned.was_refused == (len(fresh) > 6)
        standing = standing if planned.was_refused else entries_of(fresh)
        assert entries_of(planned.tasks) == standing


def test_every_layer_is_planned_at_the_same_address() -> None:
    planned = plan_each([np.array([0, 4, 5]), np.array([0, 1, 5])], target=2, capacity=8)
    assert len({plan.address for plan in planned}) == 1
    assert entries_of(planned[0].tasks) != entries_of(planned[1].tasks)


def test_storage_without_room_is_refused() -> None:
    with pytest.raises(RefusedInput, match=r"capacity is 0.*\[PLAN-CAPACITY\]"):
        TaskStorage(capacity=0)
    with pytest.raises(RefusedInput, match=r"num_tasks is 3, but the plan was made for 2 \[PLAN-CAPACITY\]"):
        TaskStorage(capacity=2).plan(np.array([0, 3]), target=1)


@st.composite
def logs(draw: st.DrawFn) -> list[StorageEvent]:
    events, in_flight, runs = [StorageEvent("update")], [], 0
    for kind in draw(st.lists(st.sampled_from(["update", "launch", "finish"]), max_size=20)):
        if kind == "launch":
            in_flight.append(runs)
            events.append(StorageEvent("launch", runs))
            runs += 1
        elif kind == "update" or not in_flight:
            events.append(StorageEvent("update"))
        else:
            run = in_flight.pop(draw(st.integers(0, len(in_flight) - 1)))
            events.append(StorageEvent("finish", run))
    return events


@settings(max_examples=profiles.examples(150))
@given(logs(), st.integers(1, 3))
def test_a_run_finds_at_its_end_what_it_was_launched_with(events: list[StorageEvent], num_buffers: int) -> None:
    answers = replay_storage(num_buffers, events)
    buffers, seen = [-1] * num_buffers, dict[int, tuple[int, int]]()
    for version, (event, answer) in enumerate(zip(events, answers, strict=True)):
        if event.kind == "update" and answer != WAIT:
            buffers[answer] = version
        elif event.kind == "launch":
            seen[event.run] = answer, buffers[answer]
        elif event.kind == "finish":
            assert (answer, buffers[answer]) == seen[event.run]
    assert storage_fault(num_buffers, events, answers) == ""


def test_a_buffer_of_two_runs_is_kept_for_the_second() -> None:
    log = [StorageEvent("update"), StorageEvent("launch", 0), StorageEvent("launch", 1), StorageEvent("finish", 0)]
    assert replay_storage(1, [*log, StorageEvent("update")])[-1] == WAIT
    assert replay_storage(1, [*log, StorageEvent("finish", 1), StorageEvent("update")])[-1] == 0


@pytest.mark.parametrize(
    "log",
    [
        [StorageEvent("launch", 0)],
        [StorageEvent("update"), StorageEvent("finish", 0)],
        [StorageEvent("update"), StorageEvent("launch", 0), StorageEvent("launch", 0)],
    ],
)
def test_a_log_that_cannot_have_happened_is_refused(log: list[StorageEvent]) -> None:
    with pytest.raises(RefusedInput, match=r"\[PLAN-STORAGE\]"):
        replay_storage(2, log)
    with pytest.raises(RefusedInput, match="num_buffers is 0"):
        replay_storage(0, [])


@pytest.mark.parametrize(
    ("answers", "fault"),
    [([0, 0, 0], "writes buffer 0"), ([0, 0, -1], "waits although buffer 1"), ([0, 1, 1], "reads buffer 1, not 0")],
)
def test_the_judge_tells_an_unsound_answer(answers: list[int], fault: str) -> None:
    events = [StorageEvent("update"), StorageEvent("launch", 0), StorageEvent("update")]
    assert fault in storage_fault(2, events, answers)
