"""A step that outgrows its tier, as the bench makes it."""

import pytest

from attnconform.conformance.bench.honesty import ERROR_BOUND
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.outgrown import FITS, PLANNED, THERE, Outgrown, keep_worst, tier_rows


@pytest.fixture(scope="module")
def drawn(machine):
    return Outgrown.drawn(machine)


def test_every_kind_of_step_gives_the_answer_of_its_lists(machine):
    rows = {row.stage: row for row in tier_rows(machine, BenchOptions(seconds=0.1))}
    assert rows.keys() == {FITS, THERE, PLANNED}
    assert all(row.error <= ERROR_BOUND for row in rows.values())
    assert all(row.clock == "host" for row in rows.values())


@pytest.mark.parametrize(("stage", "misses", "replans"), [(FITS, 0, 0), (THERE, 0, 1), (PLANNED, 1, 1)])
def test_a_step_plans_a_tier_only_where_none_is_there(drawn, monkeypatch, stage, misses, replans):
    both = drawn.both
    caches = [both]

    def small_only():
        caches.append(Outgrown.small_only(drawn))
        return caches[-1]

    monkeypatch.setattr(drawn, "small_only", small_only)
    before = both.misses, both.num_replans
    dict(drawn.stages())[stage]()
    used = caches[-1]
    assert (used.misses - before[0], used.num_replans - before[1]) == (misses, replans)


def test_an_answer_that_was_not_written_is_the_worst_of_all(drawn):
    errors = {}
    for error in (0.1, float("nan"), 0.2):
        keep_worst(errors, "s", error)
    assert errors["s"] != errors["s"]
    assert drawn.error_of(lambda: None, drawn.small) != 0
