"""Lines of the table in processes side by side: they warm up together, and take turns at measuring.

Imports, compilation, tuning and first calls of 30 lines one after another take longer than a GPU is lent; beside each
other they take as long as the slowest. A time is worth something only where nothing else runs, so no line is timed
before all are ready, or half of the limit has passed; then one after another, the others waiting without a breath.
Lines whose host's clock counts come last. A line that raises, dies, hangs or gets no turn is named, and so is what it
was to reach.
"""

import math
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Literal

import msgspec

from attnconform.conformance.bench.line_process import Done, Measured, Message, Ready, Turn, decode
from attnconform.conformance.bench.row import BenchRow, LineRun
from attnconform.conformance.bench.targets import Line
from attnconform.conformance.process import GRACE, end_group, exit_code_within, last_words

WARMING_SHARE = 0.5  # of the limit; then those that are ready are measured beside those that are not
POLL = 0.2  # seconds
State = Literal["waiting", "warming", "ready", "measuring", "over"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many at a time, and how long."""

    processes: int
    limit: float | None = None  # seconds for all of it
    warm_limit: float = 300.0  # for one line to get ready
    turn_limit: float = 60.0  # for one turn; after it no block is begun
    grace: float = 12.0  # from there until it is ended


@dataclass(eq=False)
class Process:
    """A line, and the process that it has while it has one."""

    line: Line
    state: State = "waiting"
    rows: list[BenchRow] = field(default_factory=list)
    run: LineRun | None = None  # how it went, once it is over
    warm_seconds: float | None = None
    beside: int = 0
    since: float = 0.0  # when its state began
    allowed: float = 0.0  # seconds in it
    unread: bytes = b""

    def start(self, table: str, device: str, allowed: float) -> None:
        """Its own process group, so that what it started can be ended with it."""
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "attnconform.conformance.bench.line_process", table, self.line.title, device]
        # Every process compiles by itself: a pool of compilers beside each would be more than there are cores.
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
            env=environment,
        )  # fmt: skip
        self.enter("warming", allowed)

    def enter(self, state: State, allowed: float = math.inf) -> None:
        self.state, self.since, self.allowed = state, time.monotonic(), allowed

    @property
    def seconds(self) -> float:
        """In this state."""
        return time.monotonic() - self.since

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def give_turn(self, seconds: float, grace: float, beside: int) -> None:
        """Lets it measure: no block begins after so many seconds, and what is begun may take a little longer."""
        assert self.process.stdin is not None
        self.beside = beside
        self.enter("measuring", seconds + grace)
        with suppress(BrokenPipeError):  # it died while it waited, which its output tells next
            self.process.stdin.write(msgspec.json.encode(Turn(seconds)) + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[Message]:
        """What it said since the last time; a process that said nothing more than its end is over."""
        said = os.read(self.output.fileno(), 1 << 20)
        *whole, self.unread = (self.unread + said).split(b"\n")
        found = [decode(one) for one in whole]
        return found if said else [*found, Done("failed", self.last_words())]

    def last_words(self) -> str:
        """How a process ended that did not say so."""
        code = exit_code_within(self.process, GRACE)
        if code is None:
            return "the process closed its output and did not end"
        self.log.seek(0)
        said = last_words(self.log.read().decode(errors="replace"))
        return f"the process ended with {code}" + (f": {said}" if said else "")

    def finish(self, done: Done) -> None:
        """What is known of the line is all that will be known."""
        self.end()
        self.enter("over")
        self.run = LineRun(
            name=self.line.title, state=done.state, note=done.note, warm_seconds=self.warm_seconds,
            timed_seconds=done.seconds, beside=self.beside, environment=done.environment,
        )  # fmt: skip

    def end(self) -> None:
        """Ends the process and what it started; nothing where there is none."""
        if self.state in ("waiting", "over"):
            return
        end_group(self.process)
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):  # a turn that it did not live to read
                self.process.stdin.close()
        self.output.close()
        self.log.close()


@dataclass(eq=False)
class Turns:
    """All processes of one run."""

    lines: list[Line]
    schedule: Schedule
    device: str
    table: str  # MODULE:FUNCTION, where a process finds its line by its title
    begin: Callable[[], object] = lambda: None  # called once, before the first turn
    has_begun: bool = False

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.processes = [Process(line) for line in self.lines]

    def those(self, *states: State) -> list[Process]:
        return [process for process in self.processes if process.state in states]

    @property
    def left(self) -> float | None:
        """Seconds of the limit."""
        limit = self.schedule.limit
        return None if limit is None else self.started + limit - time.monotonic()

    def run(self) -> Iterator[Process]:
        """Every line as soon as it is over, whatever became of it."""
        try:
            while self.those("waiting", "warming", "ready", "measuring"):
                if self.left is not None and self.left <= 0:
                    yield from self.out_of_time()
                else:
                    self.give_turn()
                    self.start_some()
                yield from self.hear()
                yield from self.overdue()
        finally:
            for process in self.processes:
                process.end()
            self.selector.close()

    def start_some(self) -> None:
        """As many side by side as are allowed; once turns are being taken, none while one could be given."""
        if self.has_begun and self.those("ready", "measuring"):
            return
        free = self.schedule.processes - len(self.those("warming"))
        for process in self.those("waiting")[: max(0, free)]:
            process.start(self.table, self.device, self.schedule.warm_limit)
            self.selector.register(process.output, selectors.EVENT_READ, process)

    def give_turn(self) -> None:
        """To the next that is ready, where none is measuring and it is time to."""
        ready, busy = self.those("ready"), self.those("waiting", "warming")
        if not ready or self.those("measuring") or not (self.has_begun or not busy or self.is_late):
            return
        if not self.has_begun:
            self.has_begun = True
            self.begin()
        chosen = min(ready, key=lambda process: process.line.needs_quiet)
        chosen.give_turn(self.share, self.schedule.grace, len(self.those("warming")))

    @property
    def share(self) -> float:
        """Seconds of a turn: as long as it likes, or an equal part of what is left, in which it times fewer blocks."""
        if self.left is None:
            return self.schedule.turn_limit
        return min(self.schedule.turn_limit, self.left / len(self.those("waiting", "warming", "ready")))

    @property
    def is_late(self) -> bool:
        """Whether warming has had its share."""
        limit = self.schedule.limit
        return limit is not None and time.monotonic() - self.started > WARMING_SHARE * limit

    def hear(self) -> Iterator[Process]:
        """Takes in what processes say, for a moment."""
        for key, _ in self.selector.select(POLL):
            process: Process = key.data
            for message in process.read():
                match message:
                    case Ready():
                        process.warm_seconds = message.seconds
                        process.enter("ready")
                    case Measured():
                        process.rows.append(message.row)
                    case Done() if process.state != "over":
                        yield self.finish(process, message)

    def overdue(self) -> Iterator[Process]:
        """Ends those that take too long for what they are at."""
        for process in self.those("warming", "measuring"):
            if process.seconds > process.allowed:
                yield self.finish(process, Done("hung", f"{process.state} for more than {process.seconds:.0f} s"))

    def out_of_time(self) -> Iterator[Process]:
        """The limit is reached: whoever does not measure yet never will."""
        for process in self.those("waiting", "warming", "ready"):
            said = f"{process.state} when the limit of {self.schedule.limit:.0f} s was reached"
            yield self.finish(process, Done("out of time" if process.state == "ready" else "not ready", said))

    def finish(self, process: Process, done: Done) -> Process:
        if process.state != "waiting":
            self.selector.unregister(process.output)
        process.finish(done)
        return process
