"""The suite's end of the protocol: nothing that a program does keeps it waiting for longer than it was told."""

import os
import shlex
import sys
import time

import pytest

from attnconform.conformance.exec.program import (
    MAX_LINE,
    MAX_UNREAD,
    Program,
    ProgramDied,
    ProgramTimeout,
    ProtocolError,
)

WELL = (
    '{"type":"started","protocol":1,"name":"x","versions":{}}',
    '{"type":"capabilities","capabilities":{}}',
)
LIMIT = 2.0


@pytest.fixture
def started(tmp_path):
    """Starts a program that answers start and capabilities and then does as it is told."""

    def start(body, timeout=LIMIT):
        script = tmp_path / "program.py"
        answers = "".join(f"sys.stdin.readline(); print({answer!r}, flush=True)\n" for answer in WELL)
        script.write_text(f"import os, subprocess, sys, time\n{answers}{body}\n")
        return Program(shlex.join([sys.executable, "-u", str(script)]), timeout=timeout)

    return start


def seconds_of(call, error, match):
    """How long it takes a call to fail in the given way."""
    before = time.monotonic()
    with pytest.raises(error, match=match):
        call()
    return time.monotonic() - before


def test_a_request_that_is_not_read_is_a_timeout(started):
    program = started("time.sleep(60)")
    line = b" " * (4 << 20)  # more than a pipe holds
    assert seconds_of(lambda: program.exchange_line(line, "run"), ProgramTimeout, "did not read 'run'") < 2 * LIMIT + 5
    assert not program.is_running


def test_what_was_not_asked_for_is_no_answer(started):
    program = started("print('warming up'); time.sleep(60)")
    time.sleep(1)
    with pytest.raises(ProtocolError, match="said 'warming up' before 'run' was asked"):
        program.exchange_line(b"{}", "run")
    assert not program.is_running


def test_a_program_that_ended_unasked_is_dead_and_not_silent(started):
    program = started("sys.exit(4)")
    program.process.wait()
    with pytest.raises(ProgramDied, match="ended with exit code 4 while 'run' was asked"):
        program.exchange_line(b"{}", "run")


@pytest.mark.parametrize(
    "body",
    [
        "sys.stdin.readline(); os.write(1, b'\\xff\\xfe\\n'); time.sleep(60)",
        f"sys.stdin.readline(); print('x' * {2 * MAX_LINE}); time.sleep(60)",
        'sys.stdin.readline(); print(\'{"type":"ran","id":1\'); time.sleep(60)',
    ],
)
def test_garbage_of_any_kind_is_a_protocol_error_of_one_line(started, body):
    program = started(body, timeout=20.0)
    with pytest.raises(ProtocolError, match="answered 'run' with") as error:
        program.exchange_line(b"{}", "run")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_one_that_never_stops_talking_fills_no_memory(started):
    program = started("while True: print('x' * 1000)")
    time.sleep(1)
    assert program.lines.qsize() <= MAX_UNREAD
    program.kill()
    assert not program.reader.is_alive()


def test_what_a_program_started_ends_with_it(started):
    program = started(
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "sys.stdin.readline(); print(child.pid); time.sleep(60)"
    )
    program.send(b"{}\n", "run")
    child = int(program.lines.get(timeout=20))
    before = time.monotonic()
    program.kill()
    assert time.monotonic() - before < 5
    assert not program.reader.is_alive()
    time.sleep(0.5)
    assert has_ended(child)


def has_ended(pid):
    """Whether a process is gone, or only waits to be reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"
