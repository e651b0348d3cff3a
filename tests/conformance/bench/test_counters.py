"""The hardware profiler's output, read from a recorded text."""

import pytest

from attnconform.conformance.bench.counters import figures_of, parse, split_works

HEAD = '"ID","Kernel Name","Block Size","Grid Size","Metric Name","Metric Unit","Metric Value"'


def line(number, name, grid, metric, value):
    return f'"{number}","{name}","(128, 1, 1)","({grid}, 1, 1)","{metric}","u","{value}"'


TEXT = "\n".join(
    [
        "==PROF== Connected to process 1",
        'a line that the program printed, with "quotes"',
        HEAD,
        line(0, "mark_kernel", 1, "gpu__time_duration.sum", "1,000"),
        line(1, "attend_kernel", 512, "dram__bytes_read.sum", "17,000,000"),
        line(1, "attend_kernel", 512, "dram__bytes_write.sum", "500,000"),
        line(1, "attend_kernel", 512, "gpu__time_duration.sum", "20,000"),
        line(1, "attend_kernel", 512, "lts__t_sector_hit_rate.pct", "10"),
        line(1, "attend_kernel", 512, "sm__cycles_active.avg", "500"),
        line(1, "attend_kernel", 512, "sm__cycles_active.max", "1,000"),
        line(2, "merge_kernel", 32, "dram__bytes_read.sum", "1,000,000"),
        line(2, "merge_kernel", 32, "gpu__time_duration.sum", "5,000"),
        line(2, "merge_kernel", 32, "lts__t_sector_hit_rate.pct", "60"),
        line(3, "mark_kernel", 2, "gpu__time_duration.sum", "1,000"),
        line(4, "attend_kernel", 64, "dram__bytes_read.sum", "n/a"),
    ]
)


def test_marks_divide_launches_by_work():
    works = split_works(parse(TEXT), ["first", "second"])
    assert [k.name for k in works["first"]] == ["attend_kernel", "merge_kernel"]
    assert [k.grid for k in works["second"]] == [64]


def test_bytes_add_up_and_shares_are_weighed_by_time():
    figures = figures_of(split_works(parse(TEXT), ["first", "second"])["first"])
    assert figures.bytes_dram == 18_500_000
    assert figures.bytes_written_dram == 500_000
    assert figures.l2_hit_rate == pytest.approx((10 * 20 + 60 * 5) / 25 / 100)
    assert figures.processors_busy == pytest.approx(0.5)
    assert figures.tensor_core_share is None


def test_a_figure_that_was_not_measured_is_no_figure():
    second = split_works(parse(TEXT), ["first", "second"])["second"]
    assert second[0].values == {}


def test_a_text_without_a_table_has_no_launches():
    assert parse("==ERROR== no device") == []
