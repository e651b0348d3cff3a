"""The decision tree on recorded numbers: a test per branch, and none for a subject that is well."""

import msgspec
import pytest

from attnconform.conformance.bench.diagnosing import evidence_lines
from attnconform.conformance.bench.evidence import Compute, Evidence, FixedCost, Memory, Scheduling, Times
from attnconform.conformance.bench.slices import Slice
from attnconform.conformance.bench.tree import (
    BRANCHES,
    diagnose,
    empty_tiles,
    extra_traffic,
    host_gap,
    index_dominates,
    little_in_flight,
    long_programs,
    merge_dominates,
    tail,
)

change = msgspec.structs.replace
# 64 rows of 264 pages on one H200: 277 us for 1.03 GiB
WELL = Evidence(
    subject="s",
    times=Times(
        dense=3827.0, index=28.0, attention=277.0, merge=8.0, selector=140.0, end_to_end=445.0, host_median=330.0,
        host_p99=360.0,
    ),
    memory=Memory(
        bytes_ideal=1_108_000_000, bytes_output=532_480, bytes_dram=1_120_000_000, bytes_written_dram=2_000_000,
        copy_bytes_per_second=4.26e12,
    ),
    compute=Compute(flops=4_430_000_000, matmul_flops_per_second=7e14, tensor_core_share=0.09, tile_efficiency=1.0),
    scheduling=Scheduling(processors_busy=0.97, longest_over_fair=0.26, row_mean=4224.0, row_max=4224),
    fixed=FixedCost(),
)  # fmt: skip


def altered(**groups):
    """WELL with some figures of some groups changed."""
    return change(WELL, **{group: change(getattr(WELL, group), **figures) for group, figures in groups.items()})


def conclusion(evidence):
    return diagnose(evidence)[0].conclusion


def test_what_is_well_is_told_its_roof_and_nothing_else():
    findings = diagnose(WELL)
    assert [f.conclusion for f in findings] == ["at the memory roof"]
    assert not findings[0].is_fault


def test_many_flops_near_the_matrix_rate_are_the_compute_roof():
    prefill = altered(compute={"flops": 150_000_000_000}, memory={"bytes_ideal": 50_000_000, "bytes_dram": 60_000_000})
    assert conclusion(prefill) == "at the compute roof"


def test_bytes_written_beside_the_output_are_copies():
    copies = altered(
        memory={"bytes_dram": 9_000_000_000, "bytes_written_dram": 4_400_000_000}, times={"attention": 3e3}
    )
    assert conclusion(copies) == "candidates are copied before they are read"
    assert "4.0 copies" in " ".join(diagnose(copies)[0].evidence)


def test_bytes_that_are_only_read_are_no_copies():
    assert conclusion(altered(memory={"bytes_dram": 2_500_000_000})) == "more is read than the candidates"


def test_idle_processors_and_one_long_program_are_long_rows():
    lopsided = altered(times={"attention": 900.0}, scheduling={"processors_busy": 0.2, "longest_over_fair": 7.0})
    assert conclusion(lopsided) == "a few long rows decide the time"


def test_without_counters_the_task_table_alone_tells_long_rows():
    lopsided = altered(times={"attention": 900.0}, scheduling={"processors_busy": None, "longest_over_fair": 7.0})
    assert conclusion(lopsided) == "a few long rows decide the time"


def test_idle_processors_on_an_even_table_are_not_long_rows():
    even = altered(times={"attention": 700.0}, scheduling={"processors_busy": 0.5})
    assert "a few long rows decide the time" not in [f.conclusion for f in diagnose(even)]


def test_padding_in_tiles_is_named_where_memory_is_not_the_limit():
    padded = altered(compute={"tile_efficiency": 0.3}, times={"attention": 500.0})
    assert conclusion(padded) == "tiles are mostly padding"


def test_neither_bytes_nor_flops_on_an_even_schedule_is_little_in_flight():
    assert conclusion(altered(times={"attention": 900.0})) == "too little is in flight"


def test_an_index_of_most_of_a_step_is_named():
    slow = altered(times={"index": 600.0, "end_to_end": 1017.0, "host_median": 900.0, "host_p99": 950.0})
    assert conclusion(slow) == "the index takes longer than attention"


def test_a_merge_of_a_quarter_of_attention_is_named():
    assert conclusion(altered(times={"merge": 100.0})) == "the merge takes much of attention"


def test_a_host_that_takes_twice_as_long_is_named():
    gap = altered(times={"host_median": 900.0, "host_p99": 990.0}, fixed={"waits": 2.0})
    assert conclusion(gap) == "the device waits for the host"
    assert "waits a call 2.0" in " ".join(diagnose(gap)[0].evidence)


def test_a_spike_with_plans_is_an_outgrown_tier():
    spike = altered(times={"host_p99": 12_000.0}, fixed={"replans": 38, "graph_exits": 38, "device_allocations": 38})
    assert conclusion(spike) == "steps outgrow their workspace tier"


def test_a_spike_with_a_fallback_names_its_reason():
    spike = altered(times={"host_p99": 12_000.0}, fixed={"fallbacks": {"dense-rate": 3}})
    assert "fallbacks: dense-rate: 3" in diagnose(spike)[0].evidence


def test_a_spike_without_a_cause_points_at_its_slices():
    slices = [
        Slice(by="longest_row", group=group, events=100, median=330.0, p99=p99)
        for group, p99 in (("32 to 800", 340.0), ("801 to 4096", 9000.0))
    ]
    spike = change(altered(times={"host_p99": 9_000.0}), slices=slices)
    assert conclusion(spike) == "some steps are far slower than others"
    assert "worst by longest row: 801 to 4096, P99 9000 us of 100 events" in diagnose(spike)[0].evidence


FIRES = {
    extra_traffic: altered(memory={"bytes_dram": 2_500_000_000}),
    long_programs: altered(times={"attention": 900.0}, scheduling={"longest_over_fair": 7.0, "processors_busy": 0.2}),
    empty_tiles: altered(compute={"tile_efficiency": 0.3}, times={"attention": 500.0}),
    little_in_flight: altered(times={"attention": 900.0}),
    index_dominates: altered(times={"index": 600.0, "end_to_end": 1017.0}),
    merge_dominates: altered(times={"merge": 100.0}),
    host_gap: altered(times={"host_median": 900.0, "host_p99": 990.0}),
    tail: altered(times={"host_p99": 12_000.0}),
}


def test_every_branch_has_numbers_on_which_it_fires():
    assert FIRES.keys() == set(BRANCHES)
    for branch, evidence in FIRES.items():
        assert branch(evidence).is_fault, branch.__name__


@pytest.mark.parametrize("branch", BRANCHES, ids=lambda b: b.__name__)
def test_no_branch_accuses_what_is_well(branch):
    assert branch(WELL) is None


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("healthy", "healthy below the roof"),
        ("a copy per query head", "candidates are copied before they are read"),
        ("one program per row", "a few long rows decide the time"),
        ("outgrows its tier", "steps outgrow their workspace tier"),
    ],
)
def test_what_an_h200_measured_is_diagnosed_right(recorded, subject, expected):
    findings = diagnose(recorded[subject].evidence)
    assert [f.conclusion for f in findings] == [expected]


def test_a_diagnosis_prints_four_runs_and_four_groups(recorded):
    lines = list(evidence_lines(recorded["one program per row"].evidence))
    assert [line.split(":")[0] for line in lines] == ["runs", "memory", "compute", "scheduling", "fixed cost"]
    assert "processors busy 13%" in lines[3]
    assert "dense 2186 us; index only 67; fixed candidates 954; end to end 1078" in lines[0]
