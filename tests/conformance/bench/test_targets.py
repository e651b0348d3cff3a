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
from attnconform.conformance.bench.targets import Wanted, chosen_lines, faster, judge, lines, target_rows

REAL = SimpleNamespace(is_real=True)


def told(numbers, row, wanted, *, is_real=True):
    return judge(row, wanted, numbers.ceilings, is_real=is_real)


def against(numbers, peer_time, **changes):
    return numbers.row(peer=Peer(name="p", timing=numbers.timing(peer_time)), **changes)


def test_every_line_of_the_table_has_a_peer_and_a_number():
    found = list(lines(REAL))
    peers = Counter(line.peer for line in found)
    assert peers == {"flashinfer": 4, "flex": 13, "cudnn": 1, "fla": 4, "fla-public": 2, None: 6}
    assert sum(len(line.wanted) for line in found) == 51
    assert len({line.title for line in found}) == len(found)


def test_lines_are_chosen_by_a_part_of_their_name_or_their_peer():
    found = chosen_lines(list(lines(REAL)), ("DECODE: 264", "cudnn"))
    assert [line.name.split(":")[0] for line in found] == ["decode", "decode", "decode", "prefill"]
    assert len(chosen_lines(list(lines(REAL)), ())) == len(list(lines(REAL)))
    with pytest.raises(ValueError, match="no line has nothing or nobody in its name, and there are decode: 264"):
        chosen_lines(list(lines(REAL)), ("nothing", "nobody"))


def test_only_lines_with_a_host_in_their_times_need_quiet():
    kinds = {line.name.split(":")[0]: line.needs_quiet for line in lines(REAL) if line.peer != "flex"}
    assert kinds == {
        "decode": True, "index": True, "decode from float8 codes": False, "prefill": False, "nsa": False,
        "backward": False, "backward modes": False,
    }  # fmt: skip


def test_every_line_of_the_backward_asks_for_equal_bits():
    found = [line for line in lines(REAL) if line.name.startswith("backward")]
    assert len(found) == 13
    assert all("runs bit-equal" in {wanted.measure for wanted in line.wanted} for line in found)


def test_runs_that_differ_are_no_equal_runs(numbers):
    wanted = Wanted("runs bit-equal", 20)
    assert told(numbers, numbers.row(equal_runs=20), wanted).is_met
    assert told(numbers, numbers.row(equal_runs=1), wanted).is_met is False
    assert told(numbers, numbers.row(), wanted).is_met is None


def test_what_a_line_did_not_measure_stays_in_the_table(numbers):
    line = targets.Line("work", "p", lambda m, o: iter(()), (faster(2.0), faster(3.0, "index")))
    [target] = targets.missed(line, [numbers.row()], "it died")
    assert (target.key, target.wanted, target.got, target.is_met) == (
        "targets: work, against p: index",
        3.0,
        None,
        None,
    )
    assert target.note == "it died"


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


def test_a_line_is_run_beside_its_own_peer(machine, numbers):
    def rows(m, options):
        return iter([against(numbers, 120.0, work=options.peer), numbers.row(stage="plan")])

    line = targets.Line("w", "torch", rows, (faster(1.0), faster(2.0)))
    [(row, found)] = target_rows(line, machine, BenchOptions(peer="another"), numbers.ceilings)
    assert row.key == "targets: torch, against p: attention"
    assert [t.wanted for t in found] == [1.0, 2.0]


def test_the_fp8_line_has_rows_for_what_it_wants(machine, numbers):
    [line] = chosen_lines(list(lines(machine)), ("float8",))
    [(row, [target])] = target_rows(line, machine, BenchOptions(), numbers.ceilings)
    assert row.work.startswith("float8_e4m3 per tensor")
    assert row.work.endswith("against unquantized, same kernels")
    assert target.got is not None
