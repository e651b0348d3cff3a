"""Lines in processes of their own: each is measured or named, whatever another does, and one measures at a time."""

import io
import math
import subprocess
import sys
import tempfile

import pytest
from msgspec.structs import replace
from rich.console import Console

from attnconform.conformance.bench import command, turns
from attnconform.conformance.bench.command import Request, bench_command, read_report
from attnconform.conformance.bench.line_process import Measured, decode, encode, find_line
from attnconform.conformance.bench.report_text import lines_summary
from attnconform.conformance.bench.row import LineRun
from attnconform.conformance.bench.targets import Line, faster
from attnconform.conformance.bench.turns import Process, Schedule, Turns

# What the lines of this table do, when they warm up and when they measure; each leaves its times in a folder.
TABLE = """
import os, signal, time
from pathlib import Path
from attnconform.conformance.bench.row import BenchRow, Peer
from attnconform.conformance.bench.targets import Line, faster
from attnconform.conformance.bench.timing import measure

FOLDER = Path(__file__).parent


def row(machine, name):
    started = time.time()
    ours = measure(lambda: time.sleep(0.3), machine).timing
    if not machine.is_warming:
        (FOLDER / f"{name}.times").write_text(f"{started} {time.time()}")
    peer = Peer(name="sleep", timing=measure(lambda: time.sleep(0.6), machine).timing)
    return BenchRow(suite="s", phase="decode", work=name, stage="attention", ours=ours, peer=peer, error=0.0)


def line(name, *, warming=lambda: None, measuring=lambda: None):
    def rows(machine, options):
        (warming if machine.is_warming else measuring)()
        print("this goes to the log")
        yield row(machine, name)

    return Line(name, None, rows, (faster(1.5),))


def refuse():
    raise ValueError("the work is refused")


def die():
    print("a last word", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def lines(machine):
    yield line("first")
    yield line("refuses", warming=refuse)
    yield line("dies", measuring=die)
    yield line("hangs", measuring=lambda: time.sleep(1000))
    yield line("hangs early", warming=lambda: time.sleep(1000))
    yield line("last")
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A module with a table, which other processes find too."""
    (tmp_path / "staged_lines.py").write_text(TABLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(str(tmp_path))
    import staged_lines

    yield staged_lines
    __import__("sys").modules.pop("staged_lines")


class ImpatientWithOne(Turns):
    """Whoever hangs while it warms up has had its time as soon as it is the last that warms up."""

    def overdue(self):
        for process in self.those("warming") if not self.those("waiting") else ():
            if process.line.name == "hangs early" and len(self.those("warming")) == 1:
                process.allowed = 0.0
        yield from super().overdue()


def test_a_line_that_refuses_dies_or_hangs_is_named_and_the_others_are_measured(table, tmp_path):
    begun = []
    schedule = Schedule(processes=6, turn_limit=12, grace=1)
    at_work = ImpatientWithOne(
        list(table.lines(None)), schedule, "cpu", table="staged_lines:lines", begin=lambda: begun.append(1)
    )
    over = {process.line.name: process for process in at_work.run()}
    assert {name: process.run.state for name, process in over.items()} == {
        "first": "measured", "refuses": "failed", "dies": "failed", "hangs": "hung", "hangs early": "hung",
        "last": "measured",
    }  # fmt: skip
    assert begun == [1]
    assert over["refuses"].run.note == "ValueError: the work is refused"
    assert over["dies"].run.note == "the process ended with -11: a last word"
    assert over["hangs"].run.note == "measuring for more than 13 s"
    assert over["hangs early"].run.note.startswith("warming for more than ")
    assert all(over[name].run.environment.versions["torch"] for name in ("first", "last"))
    [first, last] = sorted(tuple(map(float, (tmp_path / f"{n}.times").read_text().split())) for n in ("first", "last"))
    assert first[1] < last[0]


class LateAfterOne(Turns):
    """Half of the limit is over as soon as one line is ready, and all of it as soon as one is measured."""

    @property
    def is_late(self):
        return True

    @property
    def left(self):
        return 0.0 if self.those("over") else None


def test_a_limit_that_ends_names_what_had_no_turn(table):
    chosen = [line for line in table.lines(None) if line.name in ("first", "hangs early", "last")]
    at_work = LateAfterOne(chosen, Schedule(processes=2, limit=30), "cpu", table="staged_lines:lines")
    told = {process.line.name: (process.run.state, process.run.note) for process in at_work.run()}
    assert told == {
        "first": ("measured", ""),
        "hangs early": ("not ready", "warming when the limit of 30 s was reached"),
        "last": ("not ready", "waiting when the limit of 30 s was reached"),
    }
    assert [process.beside for process in at_work.processes] == [1, 0, 0]


def test_a_report_holds_rows_targets_and_what_became_of_every_line(table, tmp_path, monkeypatch, machine):
    monkeypatch.setitem(command.LINES, "targets", table.lines)
    path, said = tmp_path / "report.json", io.StringIO()
    code = bench_command(
        Console(file=said, width=200), suites=("targets",), json_path=path, lines=("first", "refuses"), processes=2
    )
    report = read_report(path)
    assert code == 0
    assert [run.state for run in report.lines] == ["measured", "failed"]
    assert [row.key for row in report.rows] == ["targets: first, against sleep: attention"]
    assert [target.key.split(":")[1] for target in report.targets] == [" first, against sleep", " refuses"]
    assert report.targets[0].got > 1.2
    assert report.targets[1].note == "failed: ValueError: the work is refused"
    text = said.getvalue()
    assert "1 of 2 lines measured" in text
    assert "refuses: failed" in text


def test_lines_and_processes_belong_to_the_targets():
    with pytest.raises(ValueError, match="only targets and backward-tuning have lines to part"):
        bench_command(Console(), suites=("index",), processes=2)
    with pytest.raises(ValueError, match="in one process only targets has lines to choose"):
        bench_command(Console(), suites=("backward-tuning",), lines=("window",))
    assert Request(suites=("targets",)).processes is None


@pytest.fixture
def two_tables(table, monkeypatch):
    """Two suites with lines; whatever measures, or gets ready to, fails."""
    monkeypatch.setitem(command.LINES, "targets", table.lines)
    monkeypatch.setitem(command.LINES, "backward-tuning", lambda machine: iter([table.line("other")]))
    for begins in ("counted", "measure_lines", "run_suite", "measure_ceilings"):
        monkeypatch.setattr(command, begins, lambda *_, **__: pytest.fail("something was begun"))


@pytest.mark.parametrize(
    ("suites", "lines", "processes", "refusal"),
    [
        (("targets", "backward-tuning"), ("first",), 2, "^suite backward-tuning: no line has first in .*are other$"),
        (("targets", "backward-tuning"), ("first", "other", "nobody"), 2, "^no line has nobody in .*last; other$"),
        (("index", "targets"), ("first", "other"), None, "^no line has other in .*last$"),
    ],
)
@pytest.mark.usefixtures("two_tables")
def test_a_line_that_a_suite_does_not_have_is_refused_before_any_is_measured(suites, lines, processes, refusal):
    with pytest.raises(ValueError, match=refusal):
        bench_command(Console(), suites=suites, lines=lines, processes=processes)


@pytest.mark.usefixtures("two_tables")
def test_a_picture_that_nothing_can_draw_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="matplotlib"):
        bench_command(Console(), suites=("targets",), plot=tmp_path / "plot")


def test_an_answer_that_is_no_number_is_still_none_after_the_way_to_the_parent(numbers):
    sent = Measured(numbers.row(error=float("nan"), work="two\nlines"))
    said = encode(sent)
    assert said.count(b"\n") == 1
    back = decode(said.rstrip()).row
    assert math.isnan(back.error)
    assert replace(back, error=0.0) == replace(sent.row, error=0.0)


def ready_turns(*wanted, **schedule):
    """Turns whose lines are all ready, and would say when they are given one."""
    at_work = Turns(
        [Line(stage, None, iter, (faster(1.0, stage),)) for stage in wanted],
        Schedule(processes=1, **schedule),
        "cpu",
        table="",
    )
    given = []
    for process in at_work.processes:
        process.enter("ready")
        process.give_turn = lambda *told, process=process: (
            given.append((process.line.name, *told)),
            process.enter("over"),
        )
    return at_work, given


def test_lines_that_need_quiet_come_last():
    at_work, given = ready_turns("launch", "attention", "backward x", "plan")
    for _ in range(4):
        at_work.give_turn()
    assert [name for name, *_ in given] == ["attention", "backward x", "launch", "plan"]


def test_a_process_that_died_before_its_turn_leaves_no_pipe_open():
    process = Process(Line("gone", None, iter, ()))
    process.log = tempfile.TemporaryFile()  # noqa: SIM115
    process.process = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.process.wait()
    process.enter("ready")
    process.give_turn(1.0, 1.0, 0)
    process.end()
    assert process.process.stdin.closed
    assert process.output.closed
    assert process.log.closed


def test_a_process_that_closes_its_output_and_lives_on_is_told_and_ended(monkeypatch):
    monkeypatch.setattr(turns, "GRACE", 0.2)
    process = Process(Line("mute", None, iter, ()))
    process.log = tempfile.TemporaryFile()  # noqa: SIM115
    mute = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.close(1); time.sleep(600)"
    process.process = subprocess.Popen(
        [sys.executable, "-c", mute], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    process.enter("warming")
    [done] = process.read()
    assert (done.state, done.note) == ("failed", "the process closed its output and did not end")
    process.finish(done)
    assert process.process.returncode == -9


def test_a_line_that_a_table_does_not_have_is_named(machine):
    with pytest.raises(ValueError, match=r"targets:lines has no line 'nothing'"):
        find_line("attnconform.conformance.bench.targets:lines", "nothing", machine)


def test_a_turn_is_an_equal_part_of_what_is_left():
    at_work, given = ready_turns("attention", "backward x", limit=40.0, turn_limit=60.0, grace=3.0)
    at_work.give_turn()
    at_work.give_turn()
    (_, first, grace, beside), (_, second, *_) = given
    assert first == pytest.approx(20.0, abs=0.5)
    assert second == pytest.approx(40.0, abs=0.5)
    assert (grace, beside) == (3.0, 0)


def test_the_summary_names_what_was_not_measured_and_says_what_was_not_quiet():
    runs = [LineRun(name="a", state="measured", beside=2), LineRun(name="b", state="hung", note="it slept")]
    first, second = lines_summary(runs).splitlines()
    assert first == "1 of 2 lines measured, 1 of them while others still warmed up"
    assert second == "  b: hung: it slept"
