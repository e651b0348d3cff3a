"""Processes that will not end are ended, and whoever waits for one that cannot be goes on."""

import os
import subprocess
import sys
import time

import pytest

from attnconform.conformance import process as processes
from attnconform.conformance.process import end_group, exit_code_within, last_words, run_within

STUBBORN = """
import os, signal, subprocess, sys, time
for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(ignored, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def is_running(pid):
    """Whether a process is there, and does not only wait to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_soon(pid):
    """Whether a process, which is another's child, ends within seconds."""
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


@pytest.fixture
def stubborn():
    """A process that ignores termination, with a child; both know no end of their own."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    process.child = int(process.stdout.readline())
    yield process
    os.killpg(process.pid, 9) if process.poll() is None else None
    process.wait()
    process.stdout.close()


def test_a_process_that_ignores_termination_ends_with_what_it_started(stubborn):
    stubborn.terminate()
    assert exit_code_within(stubborn, 0.2) is None
    assert end_group(stubborn) == -9
    assert gone_soon(stubborn.child)


def test_a_process_that_not_even_a_kill_ends_is_not_waited_for(stubborn, monkeypatch):
    monkeypatch.setattr(processes.os, "killpg", lambda pid, signal: None)  # as where it waits for a device
    before = time.monotonic()
    assert end_group(stubborn, grace=0.2) is None
    assert time.monotonic() - before < 5
    monkeypatch.undo()
    assert end_group(stubborn) == -9


def test_a_group_that_is_gone_is_no_error(stubborn):
    assert end_group(stubborn) == -9
    assert end_group(stubborn) == -9


def test_a_command_says_what_it_has_to_within_its_time():
    done = run_within(
        [sys.executable, "-c", "import os, sys; print(os.environ['WORD']); sys.exit('no')"], 60.0, env={"WORD": "a"}
    )
    assert (done.stdout, done.stderr, done.returncode) == ("a\n", "no\n", 1)


def test_a_command_that_takes_too_long_ends_with_what_it_started(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired) as late:
        run_within([sys.executable, "-c", STUBBORN], 3.0)
    assert gone_soon(int(late.value.stdout))


COMPILER = """Traceback (most recent call last):
  File "rule.py", line 1, in <module>
triton.compiler.errors.CompilationError: at 1:19:
def is_even(q_idx: Any, kv_idx: Any):
                   ^
NameError("Cannot access global variable Any")

The above exception was the direct cause of the following exception:

triton.compiler.errors.CompilationError: at 9:14:
    allowed = rule_allows(q_idx)
              ^
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("ValueError: told\nand handled\nSegmentation fault\n\n", "Segmentation fault"),
        ("Traceback\nKeyError: 1\n\nTraceback\nValueError: the last of a chain\n", "ValueError: the last of a chain"),
        (
            COMPILER,
            'triton.compiler.errors.CompilationError: at 1:19: NameError("Cannot access global variable Any")',
        ),
        ("^\n", "^"),
    ],
)
def test_last_words_name_the_error_and_not_a_mark_in_its_source(text, said):
    assert last_words(text) == said
