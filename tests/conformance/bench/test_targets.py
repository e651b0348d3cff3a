"""The table of targets: a line for everything that is to be reached, and no verdict that was not earned."""

from collections import Counter
from types import SimpleNamespace

import pytest
from rich.console import Console

from attnconform.conformance.bench import targets
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.report_text import report_lines, target_summary, target_table
from attnconform.conformance.bench.row import Peer
from attnconform.conformance.bench.targets import Wanted, faster, judge, lines, target_rows

REAL = SimpleNamespace(is_real=True)


def told(numbers, row, wanted, *, is_real=True):
    return judge(row, wanted, numbers.ceilings, is_real=is_real)


def against(numbers, peer_time, **changes):
    return numbers.row(peer=Peer(name="p", timing=numbers.timing(peer_time)), **changes)


def test_every_line_of_the_table_has_a_peer_and_a_number():
    found = list(lines(REAL))
    assert Counter(line.peer for line in found) == {"flashinfer": 4, "flex": 8, "cudnn": 1, "fla": 2, None: 2}
    assert sum(len(line.wanted) for line in found) == 23


@pytest.mark.parametrize(("peer_time", "is_met"), [(116.0, True), (114.0, False)])
def test_a_speed_is_met_from_its_factor_on(numbers, peer_time, is_met):
    target = told(numbers, against(numbers, peer_time), faster(1.15))
    assert target.is_met is is_met
    assert target.got == pytest.approx(peer_time / 100)


@pytest.mark.parametrize(("peer_time", "is_met"), [(112.0, True), (110.0, False)])
def test_a_share_of_the_peers_time_is_met_up_to_it(numbers, peer_time, is_met):
    assert told(numbers, against(numbers, peer_time), Wanted("of the peer's time", 0.9)).is_met is is_met


@pytest.mark.parametrize(("wanted", "is_met"), [(0.49, True), (0.51, False)])
def test_a_share_of_the_copy_bandwidth_needs_no_peer(numbers, wanted, is_met):
    row = numbers.row(figures=Figures(bytes_ideal=200_000_000))
    assert told(numbers, row, Wanted("of the copy bandwidth", wanted)).is_met is is_met


def test_a_time_of_the_device_is_not_that_of_the_host(numbers):
    row = numbers.row(stage="index", ours=numbers.timing(14.0, host=60.0))
    assert told(numbers, row, Wanted("us on the device", 15.0, "index")).is_met


def test_a_wrong_answer_meets_nothing_however_fast(numbers):
    for error in (0.05, float("nan")):
        target = told(numbers, against(numbers, 900.0, error=error), faster(1.15))
        assert target.is_met is False
        assert "off by" in target.note


def test_a_peer_that_did_not_run_leaves_its_target_open(numbers):
    row = numbers.row(peer=Peer(name="p", error="not installed"))
    target = told(numbers, row, faster(2.0))
    assert (target.got, target.is_met, target.note) == (None, None, "not installed")


def test_an_interpreters_times_meet_nothing(numbers):
    assert told(numbers, against(numbers, 900.0), faster(2.0), is_real=False).is_met is None


def test_the_table_says_target_measured_ratio_and_verdict(numbers):
    met, missed = (told(numbers, against(numbers, time), faster(1.15)) for time in (138.0, 80.5))
    absent = told(numbers, numbers.row(peer=Peer(name="p", error="not installed")), faster(2.0))
    console = Console(record=True, width=200)
    console.print(target_table([met, missed, absent]))
    text = console.export_text()
    for said in ("at least 1.15 times as fast", "1.38", "1.20", "0.70", "yes", "no", "not measured: not installed"):
        assert said in text
    assert target_summary([met, missed, absent]) == "1 of 3 targets met, 1 not measured"
    assert "targets met" not in "\n".join(report_lines(numbers.report(numbers.row())))


def test_a_line_is_run_beside_its_own_peer(machine, monkeypatch, numbers):
    line = targets.Line("torch", lambda m, o: iter([against(numbers, 120.0, work=o.peer)]), (faster(1.0), faster(2.0)))
    monkeypatch.setattr(targets, "lines", lambda m: iter([line]))
    [(row, found)] = target_rows(machine, BenchOptions(peer="another"), numbers.ceilings)
    assert row.key == "targets: torch, against p: attention"
    assert [t.wanted for t in found] == [1.0, 2.0]


def test_the_fp8_line_has_rows_for_what_it_wants(machine, monkeypatch, numbers):
    only = [line for line in lines(machine) if line.rows is targets.fp8_rows]
    monkeypatch.setattr(targets, "lines", lambda m: iter(only))
    [(row, [target])] = target_rows(machine, BenchOptions(), numbers.ceilings)
    assert row.work.startswith("float8_e4m3 per tensor")
    assert row.work.endswith("against unquantized, same kernels")
    assert target.got is not None
