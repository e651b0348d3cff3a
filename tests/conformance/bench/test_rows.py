"""What a benchmark row says, from recorded times, and which choices a bench refuses."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from attnconform.conformance.bench.agreement import check_comparable
from attnconform.conformance.bench.command import check_choices, read_report, write_json
from attnconform.conformance.bench.decode import BATCHES
from attnconform.conformance.bench.decode_work import DecodeShape
from attnconform.conformance.bench.figure_text import figure_lines
from attnconform.conformance.bench.figures import Bin, Figures
from attnconform.conformance.bench.prefill_work import PrefillWork
from attnconform.conformance.bench.report_text import environment_lines, print_report, table_of
from attnconform.conformance.bench.reuse import reuse_lines
from attnconform.conformance.bench.row import Peer
from attnconform.conformance.command_line import main

SOURCES = str(Path(__file__).parents[3] / "src")


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


@pytest.mark.parametrize("changes", [{"device": "other"}])
def test_reports_of_two_devices_are_not_compared(numbers, changes):
    with pytest.raises(ValueError, match="the earlier report's device is other"):
        check_comparable(numbers.report(numbers.row(), **changes), numbers.report(numbers.row()))


def test_a_report_reads_back_as_it_was_written(numbers, tmp_path):
    report = numbers.report(numbers.row(peer=Peer(name="p", timing=numbers.timing(150.0))))
    write_json(tmp_path / "r.json", report)
    assert read_report(tmp_path / "r.json") == report


def test_what_is_no_report_is_refused_by_name(tmp_path):
    (tmp_path / "r.json").write_text("{}")
    with pytest.raises(ValueError, match=r"r\.json is no bench report"):
        read_report(tmp_path / "r.json")


def test_a_peer_that_no_suite_has_is_refused():
    with pytest.raises(ValueError, match="peer is fla, but the suites have seed64k: flashinfer, flex, sdpa"):
        check_choices(("seed64k",), "triton", "fla")
    check_choices(("seed64k", "nsa"), "triton", "fla")


def test_a_suite_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="suite is decode, but must be one of seed64k, prefill"):
        check_choices(("decode",), "triton", None)


def test_another_backend_is_refused_where_only_the_bundled_kernels_run():
    with pytest.raises(ValueError, match="backend is mine, but suite prefill"):
        check_choices(("prefill",), "mine", None)


def test_an_interpreters_report_says_that_its_times_mean_nothing(machine):
    from attnconform.conformance.bench.machine import MEANINGLESS, read_environment

    assert read_environment(machine).is_interpreted
    assert "times mean nothing" in MEANINGLESS


def test_the_table_prints_a_ratio_and_its_spread_over_blocks(numbers):
    console = Console(record=True, width=200)
    peer = Peer(name="flashinfer", timing=numbers.timing(150.0, apart=0.2))
    console.print(table_of(numbers.report(numbers.row(peer=peer))))
    text = console.export_text()
    assert "1.50" in text
    assert "1.36 to 1.63" in text


def test_a_table_in_a_file_is_wide_enough_for_its_numbers(numbers):
    file = io.StringIO()
    row = numbers.row(work="264 pages of 16 per KV head of 65536, batch 64", ours=numbers.timing(12345.6))
    print_report(Console(file=file, width=80), numbers.report(row))
    assert "12345.6" in file.getvalue()
    assert "…" not in file.getvalue()


def test_a_ratio_of_blocks_pairs_what_was_timed_one_after_the_other(numbers):
    slower = numbers.timing(100.0, apart=0.5)
    row = numbers.row(ours=slower, peer=Peer(name="p", timing=slower))
    assert row.speedups == [1.0] * 6


def test_a_row_says_on_what_terms_its_peer_ran(numbers):
    peer = Peer(name="p", timing=numbers.timing(1.0), outputs="out", workspace_bytes=2**29, path="flash_fwd_kernel")
    text = "\n".join(figure_lines(numbers.row(peer=peer), numbers.ceilings))
    assert "gives out, reserves 512 MiB" in text
    assert "kernels flash_fwd_kernel" in text


def test_a_peer_that_did_not_run_says_why(numbers):
    text = "\n".join(figure_lines(numbers.row(peer=Peer(name="p", error="not installed")), numbers.ceilings))
    assert "p did not run: not installed" in text


def test_programs_are_printed_by_their_work(numbers):
    bins = [Bin(512, 1024, 320), Bin(4096, 8192, 2)]
    text = "\n".join(figure_lines(numbers.row(figures=Figures(program_histogram=bins)), numbers.ceilings))
    assert "programs by keys: 512 to 1023: 320, 4096 to 8191: 2" in text


def test_a_report_says_what_may_explain_a_difference(machine):
    from attnconform.conformance.bench.machine import read_environment

    text = "\n".join(environment_lines(read_environment(machine)))
    assert "interpreter" in text
    assert "torch" in text
    assert "load" in text


def test_a_plan_is_shared_by_as_many_layers_as_use_it(numbers):
    peer = Peer(name="flex", timing=numbers.timing(50.0, host=640.0))
    plan = numbers.row(stage="one-off plan", ours=numbers.timing(1.0, host=3200.0), peer=peer)
    attention = numbers.row(peer=Peer(name="flex", timing=numbers.timing(90.0)))
    line = next(reuse_lines(numbers.report(plan, attention)))
    assert line.endswith("shared by 1, 3300 us a layer (flex 730); shared by 32, 200 us a layer (flex 110)")


def test_the_command_imports_no_triton_before_it_knows_whether_to_interpret():
    code = "import sys, attnconform.conformance.bench.command; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": SOURCES}).returncode == 0


def test_a_suite_ends_at_its_limit_and_says_that_it_is_not_complete(machine, tmp_path):
    arguments = ["bench", "--suite", "index", "--limit", "0.001", "--json", str(tmp_path / "r.json")]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    report = read_report(tmp_path / "r.json")
    assert report.rows == []
    assert report.notes[-1] == "suite index is not complete: its limit of 0.001 s was reached"


def test_an_interpreters_times_agree_with_nothing(numbers, machine, tmp_path):
    write_json(tmp_path / "r.json", numbers.report(numbers.row()))
    done = CliRunner().invoke(main, ["bench", "--suite", "index", "--agrees-with", str(tmp_path / "r.json")])
    assert done.exit_code == 2
    assert "without a GPU, times mean nothing" in done.output
