"""What a benchmark row says, from recorded times, and which choices a bench refuses."""

import pytest
from rich.console import Console

from attnconform.conformance.bench.agreement import disagreements
from attnconform.conformance.bench.command import check_choices, figure_lines, read_report, table_of, write_json
from attnconform.conformance.bench.decode import BATCHES
from attnconform.conformance.bench.decode_work import DecodeShape
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.prefill_work import PrefillWork
from attnconform.conformance.bench.reuse import reuse_lines
from attnconform.conformance.bench.row import Peer


def test_a_speedup_is_the_peers_time_over_ours_by_one_clock(numbers):
    peer = Peer(name="p", timing=numbers.timing(150.0, host=900.0))
    assert numbers.row(peer=peer).speedup == pytest.approx(1.5)
    assert numbers.row(peer=peer, stage="index").speedup == pytest.approx(900.0 / 200.0)
    assert numbers.row().speedup is None
    assert numbers.row(peer=Peer(name="p", error="not installed")).speedup is None


def test_shares_are_of_the_ceilings_measured_in_the_same_process(numbers):
    assert numbers.row().copy_share(numbers.ceilings) == pytest.approx(0.5)
    assert numbers.row(figures=Figures(flops_useful=35_000_000_000)).matmul_share(numbers.ceilings) == pytest.approx(
        0.5
    )


def test_valid_tokens_are_not_processed_tokens(numbers):
    row = numbers.row(figures=Figures(valid_tokens=64, processed_tokens=256))
    assert row.valid_tokens_per_second == pytest.approx(64 / 100e-6)
    assert row.processed_tokens_per_second == pytest.approx(256 / 100e-6)


def test_a_window_counts_the_edges_it_keeps():
    assert PrefillWork("w", 1, 8, window=4).edges == 26
    assert PrefillWork("w", 2, 8).edges == 2 * 36


def test_the_64k_case_is_the_articles():
    shape = DecodeShape(batch=1)
    assert shape.candidates == 264 * 16
    assert shape.candidates * 512 * shape.num_kv_heads == 16.5 * 2**20
    assert BATCHES == (1, 8, 64)


def test_the_table_has_a_line_a_row(numbers):
    assert table_of(numbers.report(numbers.row(), numbers.row())).row_count == 2


def test_reserved_memory_stands_beside_used_memory(numbers):
    text = "\n".join(
        figure_lines(numbers.row(figures=Figures(workspace_reserved=2**20, workspace_used=2**10)), numbers.ceilings)
    )
    assert "reserved 1 MiB, used 1 KiB" in text


def test_runs_agree_within_their_spread_and_not_beyond(numbers):
    first = numbers.report(numbers.row())
    assert disagreements(first, numbers.report(numbers.row(ours=numbers.timing(101.0)))) == []
    assert len(disagreements(first, numbers.report(numbers.row(ours=numbers.timing(110.0))))) == 1


@pytest.mark.parametrize("changes", [{"device": "other"}])
def test_reports_of_two_devices_are_not_compared(numbers, changes):
    with pytest.raises(ValueError, match="the earlier report's device is other"):
        disagreements(numbers.report(numbers.row(), **changes), numbers.report(numbers.row()))


def test_a_report_reads_back_as_it_was_written(numbers, tmp_path):
    report = numbers.report(numbers.row(peer=Peer(name="p", timing=numbers.timing(150.0))))
    write_json(tmp_path / "r.json", report)
    assert read_report(tmp_path / "r.json") == report


def test_what_is_no_report_is_refused_by_name(tmp_path):
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(ValueError, match=r"r\.json is no bench report"):
        read_report(tmp_path / "r.json")


def test_a_peer_that_no_suite_has_is_refused():
    with pytest.raises(ValueError, match="peer is fla, but the suites have seed64k: flashinfer, sdpa, dense-mask"):
        check_choices(("seed64k",), "triton", "fla")
    check_choices(("seed64k", "nsa"), "triton", "fla")


def test_another_backend_is_refused_where_only_the_bundled_kernels_run():
    with pytest.raises(ValueError, match="backend is mine, but suite prefill"):
        check_choices(("prefill",), "mine", None)


def test_an_interpreters_report_says_that_its_times_mean_nothing(machine):
    from attnconform.conformance.bench.machine import MEANINGLESS, read_environment

    assert read_environment(machine).is_interpreted
    assert "times mean nothing" in MEANINGLESS


def test_the_table_prints(numbers):
    console = Console(record=True, width=160)
    console.print(table_of(numbers.report(numbers.row(peer=Peer(name="flashinfer", timing=numbers.timing(150.0))))))
    assert "1.50" in console.export_text()


def test_a_plan_is_shared_by_as_many_layers_as_use_it(numbers):
    peer = Peer(name="flex", timing=numbers.timing(50.0, host=640.0))
    plan = numbers.row(stage="one-off plan", ours=numbers.timing(1.0, host=3200.0), peer=peer)
    attention = numbers.row(peer=Peer(name="flex", timing=numbers.timing(90.0)))
    line = next(reuse_lines(numbers.report(plan, attention)))
    assert line.endswith("shared by 1, 3300 us a layer (flex 730); shared by 32, 200 us a layer (flex 110)")
