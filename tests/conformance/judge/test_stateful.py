"""A life of a cache finds backends that carry something from one step into the next."""

from dataclasses import replace

import pytest

from attnconform.conformance.adapters.reference_plans import ReferencePlans
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.judge.stateful import Life, check_lives


class NoCapture(ReferencePlans):
    """Plans that are made again, on a device that captures nothing."""

    def capture(self, handle, tensors):
        raise NotImplementedError


class PlansOnce(StepsBackend):
    """Plans and runs, and makes a new plan for every problem."""

    def plan(self, problem, dtype):
        return problem

    def run(self, handle, tensors):
        return self.forward(handle, tensors)


class KeepsPageTables(StepsBackend):
    """A table is looked up by the lengths of its requests."""

    def __init__(self, device="cpu"):
        super().__init__(device)
        self.tables = {}

    def forward(self, problem, tensors):
        spec = problem.spec
        table = self.tables.setdefault(tuple(spec.seqlen_kv), spec.cache.page_table.copy())
        return super().forward(
            replace(problem, spec=replace(spec, cache=replace(spec.cache, page_table=table))), tensors
        )


class KeepsTheKeysOfAPlace(StepsBackend):
    """The first key of a request's first page is read once, whoever has that page later."""

    def __init__(self, device="cpu"):
        super().__init__(device)
        self.keys = {}

    def inputs(self, problem, tensors):
        q, k, v = super().inputs(problem, tensors)
        for table in problem.spec.cache.page_table:
            slot = int(table[0]) * problem.spec.cache.page_size
            k[slot] = self.keys.setdefault(slot, k[slot].copy())
        return q, k, v


class SharesATokenWithItsParent(StepsBackend):
    """Two requests with the same first page are taken to have the same lengths."""

    def forward(self, problem, tensors):
        spec = problem.spec
        longest = spec.seqlen_kv.copy()
        for n, table in enumerate(spec.cache.page_table):
            same = spec.cache.page_table[:, 0] == table[0]
            longest[n] = min(spec.seqlen_kv[same])
        if (longest == spec.seqlen_kv).all() or spec.candidates is not None:
            return super().forward(problem, tensors)
        return super().forward(replace(problem, spec=replace(spec, seqlen_kv=longest)), tensors)


@pytest.mark.parametrize("backend", [StepsBackend, PlansOnce, NoCapture, ReferencePlans])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_lives_through_all_that_happens(backend, dtype):
    check_lives(backend, examples=8, dtype=dtype)


def test_a_life_has_every_event():
    events = {"append", "evict", "move", "fork", "begin", "end", "plan_and_run", "replay"}
    assert {rule.function.__name__ for rule in Life.setup_state().rules} == events


@pytest.mark.parametrize(
    "mistake",
    [
        "keeps-the-plan-where-the-rows-fit",
        "finds-plans-without-their-candidates",
        "reads-a-stale-copy-of-the-cache",
        "gathers-keys-once",
        "ignores-the-page-table",
        "keeps-the-longest-lengths",
        "gives-a-shared-page-to-its-last-request",
        "finds-results-by-address",
        "replays-old-storage",
        "replays-the-grid-of-the-capture",
    ],
)
def test_a_life_ends_where_something_is_carried_over(mistake):
    with pytest.raises(AssertionError, match="x the bound"):
        check_lives(DEVIATIONS[mistake].build, examples=30, shrinks=False)


@pytest.mark.parametrize("wrong", [KeepsPageTables, KeepsTheKeysOfAPlace, SharesATokenWithItsParent])
def test_a_life_ends_where_pages_moved_places_were_used_again_or_a_prefix_was_forked(wrong):
    with pytest.raises(AssertionError, match="x the bound"):
        check_lives(wrong, examples=30, shrinks=False)


@pytest.mark.parametrize(
    ("mistake", "event"),
    [
        ("replays-the-grid-of-the-capture", "replay"),
        ("replays-old-storage", "replay"),
        ("finds-results-by-address", "replay"),
        ("gives-a-shared-page-to-its-last-request", "fork"),
    ],
)
def test_without_its_event_a_mistake_lives_on(mistake, event, monkeypatch):
    """What shows by one event alone: without it the same lives end well, so that the event is what finds it."""
    monkeypatch.setattr(Life, event, lambda self, **drawn: None)
    check_lives(DEVIATIONS[mistake].build, examples=30, shrinks=False)
