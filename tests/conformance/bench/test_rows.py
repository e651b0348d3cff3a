"""What a benchmark row says, from recorded times; and that there are no times without a GPU."""

import pytest
import torch
from rich.console import Console

from attnconform.conformance.bench.command import bench_command, table_of
from attnconform.conformance.bench.decode import BATCHES, CANDIDATES, NUM_KV_HEADS
from attnconform.conformance.bench.prefill import PrefillWork
from attnconform.conformance.bench.row import BenchReport, BenchRow
from attnconform.conformance.bench.timing import Ceilings, Timing

CEILINGS = Ceilings(copy_bytes_per_second=4e12, matmul_flops_per_second=7e14)


def timing(median):
    return Timing(median=median, p95=median, p99=median, events=100, host_median=median)


def row(**changes):
    fields = {"suite": "seed64k", "work": "w", "stage": "attention", "ours": timing(100.0), "bytes": 200_000_000}
    return BenchRow(**(fields | changes))


def test_a_speedup_is_the_peers_time_over_ours():
    assert row(peer=timing(150.0)).speedup == 1.5
    assert row().speedup is None


def test_shares_are_of_the_ceilings_measured_in_the_same_process():
    assert row().copy_share(CEILINGS) == pytest.approx(0.5)
    assert row(flops=35_000_000_000).matmul_share(CEILINGS) == pytest.approx(0.5)


def test_a_window_counts_the_edges_it_keeps():
    assert PrefillWork("w", 1, 8, window=4).edges == 26
    assert PrefillWork("w", 2, 8).edges == 2 * 36


def test_the_64k_case_is_the_articles():
    assert CANDIDATES == 264 * 16
    assert CANDIDATES * 512 * NUM_KV_HEADS == 16.5 * 2**20
    assert BATCHES == (1, 8, 64)


def test_the_table_has_a_line_a_row_and_names_a_missing_peer():
    report = BenchReport(date="d", device="g", driver="v", versions={}, ceilings=CEILINGS, rows=[row(), row()])
    assert table_of(report).row_count == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_are_no_times():
    with pytest.raises(ValueError, match=r"^bench needs a GPU, and torch sees none"):
        bench_command(Console(), suites=("seed64k",), peer=None, json_path=None)
