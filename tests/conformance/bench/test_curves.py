"""Crossing points, the scheduler's table, weights, slices and pictures, from recorded numbers."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from attnconform.conformance.bench.command import weighted_by
from attnconform.conformance.bench.crossing import crossing
from attnconform.conformance.bench.figures import Lengths, histogram, longest_over_fair
from attnconform.conformance.bench.plot import write_plot
from attnconform.conformance.bench.slices import SetFacts, rank_groups, slice_events
from attnconform.conformance.bench.sweep import (
    BLOCKS,
    RATES,
    axes,
    choices,
    length_crossing,
    points,
    rate_crossings,
    sweep_points,
)
from attnconform.conformance.bench.timing import Samples
from attnconform.conformance.bench.weighting import length_counts, weigh
from attnconform.conformance.replay import open_trace

# the article's table (7.1): rate -> microseconds of blocks of 16, 32 and 64; dense 118
TABLE = {0.031: (42, 35, 38), 0.0625: (55, 46, 44), 0.125: (78, 66, 59), 0.25: (126, 101, 88), 0.5: (214, 162, 133)}


@pytest.fixture
def article(numbers):
    """The article's table as a sweep."""
    return [
        numbers.point(axis="rate and block", rate=rate, block_size=block, attention=float(time), index=0.0, dense=118.0)
        for rate, times in TABLE.items()
        for block, time in zip((16, 32, 64), times, strict=True)
    ]


def test_the_articles_table_is_chosen_as_the_article_does(article):
    assert list(choices(article).values()) == ["block 32", "block 64", "block 64", "block 64", "dense"]


def test_the_articles_curves_cross_where_its_table_says(article):
    crossings = rate_crossings(article)
    assert 0.125 < crossings[16] < 0.25
    assert 0.25 < crossings[32] < crossings[64] < 0.5


@pytest.mark.parametrize(("sparse", "dense"), [([1, 2], [3, 4]), ([3, 4], [1, 2])])
def test_curves_that_never_meet_have_no_crossing(sparse, dense):
    assert crossing([1, 2], sparse, dense) is None


def test_a_length_from_which_sparse_is_faster_is_found(numbers):
    line = [numbers.point(seqlen_kv=n, attention=9.0, index=6.0, dense=n / 100) for n in (256, 1024, 4096)]
    assert length_crossing(line) == pytest.approx(1500, rel=0.01)


def test_every_length_of_a_trace_counts_once(numbers):
    points = [numbers.point(seqlen_kv=n, dense=float(n)) for n in (128, 1024, 8192)]
    weighted = weigh("t", "decode", {100.0: 3, 5000.0: 1}, points)
    assert weighted.shares == {128: 0.75, 1024: 0.0, 8192: 0.25}
    assert weighted.outside == 0.75
    assert weighted.dense == 0.75 * 128 + 0.25 * 8192
    assert weighted.best == weighted.sparse == 15.0


def test_phases_are_never_weighed_together(numbers):
    chunk = numbers.point(axis="chunk", seqlen_q=512)
    with pytest.raises(ValueError, match="decode is weighed, and chunk: kv 1024"):
        weigh("t", "decode", {100.0: 1}, [numbers.point(), chunk])
    assert weigh("t", "prefill", {100.0: 1}, [chunk]).phase == "prefill"


def test_a_sweep_has_a_summary_of_each_phase(numbers):
    sweep = [numbers.point(), numbers.point(axis="chunk", seqlen_q=512), numbers.point(axis="batch")]
    weighted = weighted_by(sweep, open_trace(Path("gemma3_270m")))
    assert [w.phase for w in weighted] == ["decode", "prefill"]
    assert weighted_by([numbers.point(axis="batch")], None) == []


def test_the_ends_of_every_axis_come_before_what_lies_between():
    real = SimpleNamespace(is_real=True)
    found = points(real)
    assert len(found) == len(BLOCKS) * len(RATES) + 6 + 4 + 3 + 4 + 4
    early = found[: 2 * len(axes(real))]
    for line in axes(real):
        assert line[0] in early
        assert line[-1] in early
    assert {p.axis for p in found} >= {"rate and block", "length", "batch", "query length", "clustering", "chunk"}


def test_a_sweep_ends_when_its_time_is_up_and_says_what_is_missing(machine):
    notes = []
    assert list(sweep_points(machine, notes, seconds=0.0)) == []
    assert notes == ["the time was up: 14 of 14 points of the sweep were left out"]


def test_nothing_to_weigh_is_refused(numbers):
    with pytest.raises(ValueError, match="t has 0 lengths of decode"):
        weigh("t", "decode", {}, [numbers.point()])


def test_a_recorded_trace_has_lengths_of_both_phases():
    trace = open_trace(Path("gemma3_270m"))
    for phase in ("prefill", "decode"):
        counts = length_counts(trace, phase)
        assert sum(counts.values()) > 0
        assert all(length >= 1 for length in counts)


def test_a_tail_is_found_in_the_slice_that_has_it():
    sets = np.arange(400) % 4
    device = np.where(sets == 3, 900.0, 100.0)
    samples = Samples(device, sets, device, device, num_sets=4)
    facts = [
        SetFacts(candidate_blocks=64, pages_touched=64, longest_row=32 if n < 3 else 800, fallback="none")
        for n in range(4)
    ]
    by = {(s.by, s.group): s for s in slice_events(samples, facts)}
    assert by["longest_row", "800 to 800"].p99 == 900.0
    assert by["longest_row", "32 to 32"].p99 == 100.0
    assert by["pages_touched", "64 to 64"].events == 400
    assert by["fallback", "none"].p99 == 900.0


def test_groups_hold_equal_values_together():
    assert rank_groups(np.array([5, 5, 5, 5, 9])).tolist() == [0, 0, 0, 0, 1]
    assert rank_groups(np.arange(8)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_work_is_binned_by_powers_of_two():
    bins = [(b.low, b.high, b.programs) for b in histogram(np.array([0, 1, 2, 3, 64, 100]))]
    assert bins == [(0, 1, 1), (1, 2, 1), (2, 4, 2), (64, 128, 2)]


def test_a_balanced_schedule_has_no_program_above_its_share():
    assert longest_over_fair(np.full(264, 100), 132) == 0.5
    assert longest_over_fair(np.array([1000] + [1] * 131), 132) > 100


def test_lengths_name_the_ranks_that_rows_have():
    lengths = Lengths.of(np.array([1, 2, 3, 100]))
    assert (lengths.p50, lengths.p95, lengths.max) == (2, 100, 100)


@pytest.mark.parametrize("has_sweep", [True, False])
def test_a_report_becomes_a_picture_and_a_page(article, numbers, tmp_path, has_sweep):
    pytest.importorskip("matplotlib")
    lines = [
        numbers.point(axis=axis, **{field: value})
        for axis, field, values in (
            ("length", "seqlen_kv", (256, 1024)), ("batch", "batch", (1, 8)), ("clustering", "run_length", (1, 4)),
            ("query length", "seqlen_q", (1, 4)),
        )
        for value in values
    ]  # fmt: skip
    report = numbers.report(sweep=[*article, *lines]) if has_sweep else numbers.report(numbers.row())
    png, page = write_plot(report, tmp_path / "f.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "data:image/png;base64," in text
    assert ("block 64" in text) == has_sweep
