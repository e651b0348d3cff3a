"""Cold starts: which kernels a first call compiles, what other numbers compile again, and what is said of both."""

import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from attnconform.conformance.bench import cold_starts, report_text
from attnconform.conformance.bench.cold_starts import ColdStart, KernelStart, by_kernel
from attnconform.conformance.bench.compiles import Compilation, CompileLog
from attnconform.conformance.bench.machine import Machine, TimeUp
from attnconform.conformance.bench.start_works import WORKS

SOURCES = Path(__file__).parents[3] / "src"
KERNELS = SOURCES / "attnconform" / "kernels" / "sparse_attention"
ELSEWHERE = {
    # of one architecture
    "hopper_kernel", "hopper_keys_kernel", "hopper_query_kernel", "hopper_rows_kernel", "hopper_union_kernel",
    "hopper_union_query_kernel",
    "merge_kernel", "sum_chunks_kernel",  # where a work is larger than those without a GPU
}  # fmt: skip


@pytest.fixture(scope="module")
def counted():
    """Every work in one process that compiles nothing: cold starts by name, without their seconds."""
    script = Path(__file__).with_name("count_starts.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-P", script], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = [msgspec.json.decode(line, type=ColdStart) for line in done.stdout.splitlines()]
    return {start.work: start for start in found}


def bundled_kernels():
    """Names of the functions that a launch begins with, from the source of the bundled kernels."""
    sources = [file.read_text() for file in KERNELS.glob("*.py")]
    return {name for source in sources for name in re.findall(r"^def ([a-z]\w*_kernel)\(", source, re.MULTILINE)}


def test_every_bundled_kernel_is_started_by_some_work(counted):
    assert counted.keys() == WORKS.keys()
    started = {kernel.kernel for start in counted.values() for kernel in start.kernels}
    assert started == bundled_kernels() - ELSEWHERE


@pytest.mark.parametrize("work", WORKS)
def test_other_lengths_candidates_and_batches_ask_for_nothing_new(counted, work):
    assert counted[work].kernels
    assert counted[work].changed == dict.fromkeys(counted[work].changed, 0) != {}


def test_a_change_of_what_is_compiled_in_is_seen(counted):
    asked = [start.other_code for start in counted.values() if start.other_code is not None]
    assert len(asked) > 1
    assert min(asked) > 0


def test_a_works_process_says_what_it_found(machine):
    [found] = cold_starts.cold_starts(machine, ("blocks of listed tokens",))
    assert found.error == ""
    assert min(found.first, found.warm) > 0  # which is longer is chance where nothing is compiled
    assert (found.kernels, found.recompiled) == ([], 0)  # the interpreter compiles nothing
    assert not found.is_met  # and what was not compiled was not quick


def test_a_process_that_ends_badly_is_told_and_the_next_work_goes_on(machine, monkeypatch):
    monkeypatch.setattr(cold_starts, "TIMEOUT", 0.01)
    slow, unknown = "blocks of listed tokens", "no such work"
    assert cold_starts.cold_start(slow, machine).error == "took longer than 0 s"
    monkeypatch.undo()
    assert "KeyError: 'no such work'" in cold_starts.cold_start(unknown, machine).error


def test_a_process_gets_no_longer_than_what_is_left_of_the_limit():
    machine = Machine("cpu", CompileLog())
    assert cold_starts.seconds_for(machine) == cold_starts.TIMEOUT
    machine.deadline = time.monotonic() + 5.0
    assert cold_starts.seconds_for(machine) == pytest.approx(5.0 + cold_starts.GRACE, abs=1.0)
    machine.deadline += 1000.0
    assert cold_starts.seconds_for(machine) == cold_starts.TIMEOUT


def test_no_work_is_begun_after_the_limit():
    with pytest.raises(TimeUp):
        list(cold_starts.cold_starts(Machine("cpu", CompileLog(), deadline=0.0), ("decode plan",)))


def test_the_log_has_every_compilation_with_its_kernel_and_counts_what_was_only_loaded():
    log = CompileLog()
    for name, seconds, is_hit in (("a", 2.0, False), ("a", 1.0, False), ("b", 0.1, True)):
        log.hear(metadata={"name": name}, times=SimpleNamespace(total=int(1e6 * seconds)), cache_hit=is_hit, src=None)
    assert log.compilations == [Compilation("a", 2.0), Compilation("a", 1.0)]
    assert (log.compiled, log.loaded) == (2, 1)
    assert by_kernel(log.compilations) == [KernelStart(kernel="a", specializations=2, longest=2.0, total=3.0)]


def make_start(**changes):
    kernels = [KernelStart(kernel="attend_kernel", specializations=1, longest=4.0, total=4.0)]
    return ColdStart(**{"work": "w", "first": 5.0, "warm": 0.001, "kernels": kernels, "changed": {"x": 0}} | changes)


@pytest.mark.parametrize(
    ("changes", "is_met"),
    [
        ({}, True),
        ({"other_code": 2}, True),
        ({"other_code": 0}, False),
        ({"changed": {"x": 1}}, False),
        ({"kernels": [KernelStart(kernel="k", specializations=1, longest=10.0, total=10.0)]}, False),
        ({"kernels": []}, False),
    ],
)
def test_a_start_is_met_where_kernels_are_quick_and_only_code_compiles(changes, is_met):
    assert make_start(**changes).is_met == is_met


def test_the_table_has_a_line_for_every_kernel_and_says_what_went_wrong(numbers):
    report = msgspec.structs.replace(
        numbers.report(), starts=[make_start(other_code=1), make_start(work="v", error="ended", first=None, kernels=[])]
    )
    told = io.StringIO()
    report_text.print_report(Console(file=told, width=200), report)
    text = told.getvalue()
    assert "attend_kernel" in text
    assert "ended" in text
    assert "1 kernels, 1 of 2 works met; the longest compilation took 4.00 s of 10 s" in text
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report
