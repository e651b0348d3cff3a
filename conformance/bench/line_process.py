"""A line of the table in a process of its own: it compiles and warms up, says so, waits for its turn, then measures.

What it says goes to the parent, one message a line; what anything else prints goes to its log. It ends when the
parent does, whatever it is at.

    python -m attnconform.conformance.bench.line_process MODULE:FUNCTION TITLE < turn
"""

import os
import queue
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import BinaryIO

import msgspec
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.machine import (
    Environment,
    Machine,
    TimeUp,
    open_machine,
    read_clocks,
    read_environment,
)
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.row import BenchRow, Ending
from attnconform.conformance.bench.targets import Line, line_rows
from attnconform.conformance.isolation import OUT_OF_MEMORY

ATTEMPTS, PAUSE = 6, 5.0  # to warm up beside others that hold memory, and seconds between them


class Ready(msgspec.Struct, frozen=True, tag=True):
    """It waits for its turn."""

    seconds: float


class Measured(msgspec.Struct, frozen=True, tag=True):
    row: BenchRow


class Done(msgspec.Struct, frozen=True, tag=True):
    """Nothing more comes; `note` says why where something is missing."""

    state: Ending = "measured"
    note: str = ""
    seconds: float | None = None  # of the turn
    environment: Environment | None = None


Message = Ready | Measured | Done


def encode(message: Message) -> bytes:
    """One line. JSON has no NaN, and an error that is none would come back as one that was not looked for."""
    return b64encode(msgspec.msgpack.encode(message)) + b"\n"


def decode(line: bytes) -> Message:
    return msgspec.msgpack.decode(b64decode(line), type=Message)


class Turn(msgspec.Struct, frozen=True):
    """What the parent says: the device is yours, for so long."""

    seconds: float


def find_line(table: str, title: str, machine: Machine) -> Line:
    """The line that a table, MODULE:FUNCTION, has under this title. Raises ValueError where it has none."""
    module, name = table.split(":")
    lines: Callable[[Machine], Iterator[Line]] = getattr(import_module(module), name)
    found = next((line for line in lines(machine) if line.title == title), None)
    if found is None:
        raise ValueError(f"{table} has no line {title!r}")
    return found


def warm(line: Line, machine: Machine) -> float:
    """Seconds until everything was compiled and called once; where memory is short, once more when others gave theirs.

    A work that is too large for the device fails in its turn, where it is alone.
    """
    started = time.monotonic()
    machine.is_warming = True
    for attempt in range(ATTEMPTS):
        try:
            list(line_rows(line, machine, BenchOptions()))
            break
        except Exception as failure:
            if not OUT_OF_MEMORY.search(f"{type(failure).__name__}: {failure}"):
                raise
        machine.release()
        time.sleep(PAUSE * (attempt + 1))
    machine.is_warming = False
    machine.release()
    return time.monotonic() - started


def measure_line(line: Line, machine: Machine, turn: Turn, environment: Environment) -> Iterator[Message]:
    """The rows, then how it went."""
    started = time.monotonic()
    machine.deadline = started + turn.seconds
    environment = replaced(environment, clocks=read_clocks(machine))
    done = Done()
    try:
        for row in line_rows(line, machine, BenchOptions()):
            yield Measured(row)
    except TimeUp:
        done = Done("out of time", "the limit was reached before it began")
    except Exception as failure:  # one line's fault is no other's
        done = Done("failed", told(failure))
    environment = replaced(environment, clocks_loaded=read_clocks(machine))
    yield replaced(done, seconds=time.monotonic() - started, environment=environment)


def told(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


def messages(table: str, title: str, device: str, turns: "queue.Queue[Turn]") -> Iterator[Message]:
    """The life of one line."""
    try:
        machine = open_machine(device)
        line = find_line(table, title, machine)
        environment = read_environment(machine)
        yield Ready(warm(line, machine))
    except Exception as failure:
        yield Done("failed", told(failure))
        return
    yield from measure_line(line, machine, turns.get(), environment)


def hear_parent(source: BinaryIO, turns: "queue.Queue[Turn]") -> None:
    """Hands on what the parent says; without a parent there is nothing left to do."""
    for said in source:
        turns.put(msgspec.json.decode(said, type=Turn))
    os._exit(1)


def own_output() -> BinaryIO:
    """Where messages go: the standard output as it was; from now on, prints go to the log."""
    mine = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return mine


def main(table: str, title: str, device: str) -> None:
    """Says everything, then ends without the destructors of a device that others wait for."""
    out, turns = own_output(), queue.Queue[Turn]()
    threading.Thread(target=hear_parent, args=(sys.stdin.buffer, turns), daemon=True).start()
    for message in messages(table, title, device, turns):
        out.write(encode(message))
        out.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
