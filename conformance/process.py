"""Other processes are ended, not trusted to end: whoever waits for one says how long."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

ERROR_LINE = re.compile(r"\w[\w.]*(Error|Exception)\b")  # where a traceback, or what it quotes, names its error
GRACE = 5.0  # seconds that a killed process has to be gone: one that waits for a device may never be


def exit_code_within(process: subprocess.Popen[Any], seconds: float) -> int | None:
    """A process' exit code; None where it has not ended by then."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def end_group(process: subprocess.Popen[Any], *, grace: float = GRACE) -> int | None:
    """Kills a process, which leads a group of its own, and what it started; its exit code, None where it is not gone.

    A signal that a process may catch or ignore is never tried.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return exit_code_within(process, grace)


def run_within(
    command: Sequence[str], seconds: float, *, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What a command said until it ended. Raises TimeoutExpired, having ended all of it, where it takes longer."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", env=env,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=seconds)
    except BaseException:
        end_group(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def last_words(text: str) -> str:
    """The last line that a process wrote; where that only marks a place in source, the errors that were told first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines and not any(map(str.isalpha, lines[-1])):
        lines = [line for line in lines if ERROR_LINE.match(line)][:2] or lines
        return " ".join(lines)[:300]
    return lines[-1][:300] if lines else ""
