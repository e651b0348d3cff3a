"""The seeded kernels are slow and right, and count what they do beside the kernel."""

import pytest

from attnconform.conformance.bench.diagnose import gather_evidence
from attnconform.conformance.bench.honesty import ERROR_BOUND, output_error
from attnconform.conformance.bench.seeded.batch import make_batches, ragged, row_counts
from attnconform.conformance.bench.seeded.subjects import SUBJECTS


@pytest.fixture(scope="module")
def batches(machine):
    return make_batches(machine)


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_is_right_on_both_kinds_of_batches(name, batches, machine):
    subject = SUBJECTS[name](batches, machine)
    for work in batches:
        assert output_error(lambda: subject.answer(work), work) <= ERROR_BOUND  # noqa: B023


def test_only_a_batch_that_outgrows_the_tier_is_planned_anew(batches, machine):
    subject = SUBJECTS["tier"](batches, machine)
    subject.step(batches[0])
    assert subject.fixed.replans == subject.fixed.graph_exits == 0
    subject.step(batches[1])
    assert subject.fixed.replans == subject.fixed.graph_exits == 1


def test_most_rows_are_short_and_one_is_long(machine):
    r = ragged(machine)
    counts = row_counts(r, is_longer=False)
    assert counts.count(r.long) == r.long_rows < len(counts)
    assert max(row_counts(r, is_longer=True)) == r.long + r.extra


def test_a_diagnosis_runs_the_batch_four_ways(batches, machine, numbers):
    subject = SUBJECTS["healthy"](batches, machine)
    evidence = gather_evidence(subject, batches, machine, numbers.ceilings, None)
    times = evidence.times
    assert min(times.dense, times.index, times.attention, times.selector, times.end_to_end) > 0
    assert evidence.memory.bytes_dram is None  # there is no profiler
    assert evidence.scheduling.row_max > evidence.scheduling.row_mean
    assert {s.by for s in evidence.slices} == {"candidate_blocks", "pages_touched", "longest_row", "fallback"}
