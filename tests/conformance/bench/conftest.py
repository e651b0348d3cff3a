"""Recorded numbers, and the interpreter as a machine."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from attnconform.conformance.bench.diagnosing import DiagnosisReport
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.machine import Environment, open_machine
from attnconform.conformance.bench.row import BenchReport, BenchRow, SweepPoint
from attnconform.conformance.bench.timing import Ceilings, Quantiles, Timing

CEILINGS = Ceilings(copy_bytes_per_second=4e12, matmul_flops_per_second=7e14)
FOLDER = Path(__file__).parent


def make_timing(median, *, p99=None, host=None, apart=0.02):
    """A timing whose events are all but equal, and whose blocks lie so far apart."""

    def quantiles(value, tail=None):
        blocks = [value * (1 + apart * place / 2) for place in (-1, -0.5, 0, 0, 0.5, 1)]
        return Quantiles(
            median=value, p5=value * 0.99, p95=value * 1.01, p99=tail or value * 1.02, events=1000, blocks=blocks
        )

    return Timing(device=quantiles(median, p99), host=quantiles(host or 2 * median), issue_median=20.0, warm_ups=100)


def make_row(**changes):
    fields = {
        "suite": "seed64k", "phase": "decode", "work": "w", "stage": "attention", "ours": make_timing(100.0),
        "figures": Figures(bytes_ideal=200_000_000, workspace_reserved=1000), "error": 2e-3, "rate": 0.0625,
    }  # fmt: skip
    return BenchRow(**(fields | changes))


def make_report(*rows, sweep=(), is_interpreted=False, device="NVIDIA H200"):
    environment = Environment(device=device, is_interpreted=is_interpreted)
    return BenchReport(date="d", environment=environment, ceilings=CEILINGS, rows=list(rows), sweep=list(sweep))


def make_point(**changes):
    fields = {
        "axis": "length", "seqlen_kv": 1024, "batch": 8, "seqlen_q": 1, "rate": 0.0625, "run_length": 1,
        "block_size": 16, "attention": 10.0, "index": 5.0, "dense": 20.0, "stage": "index + attention",
    }  # fmt: skip
    return SweepPoint(**(fields | changes))


@pytest.fixture(scope="session")
def numbers():
    """Makers of recorded numbers, which tests change in one place each."""
    return SimpleNamespace(ceilings=CEILINGS, timing=make_timing, row=make_row, report=make_report, point=make_point)


@pytest.fixture(scope="session")
def recorded():
    """Diagnoses measured on one H200, by the name of the subject."""
    report = msgspec.json.decode((FOLDER / "recorded_diagnoses.json").read_bytes(), type=DiagnosisReport)
    return {d.subject: d for d in report.diagnoses}


@pytest.fixture(scope="session")
def machine():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU, for its tiny shapes")
    return open_machine("cpu")
