"""The suite's end of the protocol: a program that is started, asked, timed, and buried when it dies."""

import ctypes
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from attnconform.conformance.exec.messages import (
    PROTOCOL_VERSION,
    AskCapabilities,
    Declared,
    Failed,
    Reply,
    Request,
    Start,
    Started,
    Stop,
    Stopped,
)
from attnconform.conformance.isolation import signal_name
from attnconform.conformance.process import GRACE, end_group, exit_code_within

TIMEOUT_VARIABLE = "ATTNCONFORM_EXEC_TIMEOUT"  # seconds for one answer
DEFAULT_TIMEOUT = 60.0
MAX_LINE = 1 << 20  # bytes of one answer
MAX_UNREAD = 16  # lines that wait to be read; a program that says more waits itself
SHOWN = 80  # characters of an answer that is none
TICK = 0.01
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None  # loaded before a fork, which may not allocate

R = TypeVar("R", bound=Reply)


class ProgramError(Exception):
    """A program that did not answer as the protocol has it; one line says how."""


class ProgramDied(ProgramError):
    """It ended where it should have answered."""


class ProgramTimeout(ProgramError):
    """It did not answer in time."""


class ProtocolError(ProgramError):
    """It answered something that is not the protocol."""


class ProgramFailed(ProgramError):
    """It answered that it could not."""


class ProgramOutOfMemoryError(ProgramError):
    """It answered that memory ran out."""


class Program:
    """A running program, after the handshake. Raises ProgramError, or OSError where it cannot be started."""

    def __init__(self, command: str, *, device: str = "cpu", timeout: float | None = None) -> None:
        self.command = command
        self.timeout = timeout if timeout is not None else asked_timeout()
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the program
        arguments = shlex.split(command)
        if not arguments:
            raise ValueError("exec: names no command")
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            preexec_fn=end_with_parent if LIBC is not None else None,
            process_group=0,  # what it starts ends with it
        )
        self.sender: Sender | None = None
        self.lines: queue.Queue[bytes] = queue.Queue(MAX_UNREAD)
        self.reader = threading.Thread(target=self.read_lines, daemon=True)
        self.reader.start()
        try:
            self.started = self.ask(Start(device=device), Started)
            if self.started.protocol != PROTOCOL_VERSION:
                raise ProtocolError(f"speaks protocol {self.started.protocol}, but this is {PROTOCOL_VERSION}")
            self.capabilities = self.ask(AskCapabilities(), Declared).capabilities
        except BaseException:
            self.kill()
            raise

    def read_lines(self) -> None:
        """Passes lines on as they come; an empty one says that no more will."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline(MAX_LINE):
            self.lines.put(line)
        self.lines.put(b"")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def ask(self, request: Request, wanted: type[R]) -> R:
        """The answer to one request, which is of the wanted kind; otherwise as `answer`."""
        reply = self.answer(request)
        if not isinstance(reply, wanted):
            raise self.misplaced(reply, request)
        return reply

    def answer(self, request: Request) -> Reply:
        """The answer to one request.

        Raises ProgramFailed or ProgramOutOfMemoryError where it is `failed`, and then the program is still well; any
        other ProgramError has ended it.
        """
        reply = self.exchange(request)
        if isinstance(reply, Failed):
            kind = ProgramOutOfMemoryError if reply.out_of_memory else ProgramFailed
            raise kind(one_line(reply.message))
        return reply

    def misplaced(self, reply: Reply, request: Request) -> ProtocolError:
        """The error of an answer to another question; the program is ended."""
        self.kill()
        return ProtocolError(f"answered {tag_of(reply)!r} to {tag_of(request)!r}")

    def exchange(self, request: Request) -> Reply:
        """Whatever message answers a request. Raises ProgramError where none does, and ends the program then."""
        name, asked = tag_of(request), getattr(request, "id", None)
        reply = self.exchange_line(msgspec.json.encode(request), name)
        answered = getattr(reply, "id", None)
        if answered is not None and answered != asked:
            self.kill()
            raise ProtocolError(f"answered {name!r} number {asked} as number {answered}")
        return reply

    def exchange_line(self, line: bytes, name: str) -> Reply:
        """Whatever message answers a line, which errors call by its name; likewise."""
        self.check_silence(name)
        self.send(line + b"\n", name)
        try:
            answer = self.lines.get(timeout=self.timeout)
        except queue.Empty:
            self.kill()
            raise ProgramTimeout(f"no answer to {name!r} within {self.timeout:g} s") from None
        if not answer:
            raise self.died(name)
        try:
            return msgspec.json.decode(answer, type=Reply)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.kill()
            raise ProtocolError(f"answered {name!r} with {excerpt(answer)}: {one_line(str(error))}") from None

    def check_silence(self, name: str) -> None:
        """Raises ProtocolError where the program has said something that nobody asked for."""
        try:
            said = self.lines.get_nowait()
        except queue.Empty:
            return
        if not said:
            raise self.died(name)
        self.kill()
        raise ProtocolError(f"said {excerpt(said)} before {name!r} was asked")

    def send(self, data: bytes, name: str) -> None:
        """Writes a request. Raises ProgramTimeout where the program does not read it, ProgramDied where it is gone."""
        self.sender = Sender(self.process.stdin, data)
        self.sender.join(self.timeout)
        if self.sender.is_alive():
            self.kill()
            raise ProgramTimeout(f"did not read {name!r} within {self.timeout:g} s")
        if self.sender.failed:
            raise self.died(name)

    def died(self, name: str) -> ProgramDied:
        """The error of a program that ended while it was asked."""
        code = exit_code_within(self.process, GRACE)
        if code is None:
            self.kill()
            return ProgramDied(f"closed its output while {name!r} was asked")
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        last = self.last_words()
        self.close_pipes()
        return ProgramDied(f"{how} while {name!r} was asked" + (f"; its last words: {last}" if last else ""))

    def last_words(self) -> str:
        """The last line on its standard error."""
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 4096))
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return one_line(lines[-1]) if lines else ""

    def end_input(self) -> int:
        """Ends its input; its exit code. Raises ProgramError where it does not end by itself then."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return self.process.wait(timeout=min(self.timeout, GRACE))
        except subprocess.TimeoutExpired:
            raise ProgramTimeout("does not end at the end of its input") from None
        finally:
            self.kill()

    def stop(self) -> int:
        """Asks it to end; its exit code. Raises ProgramError where it does not end as asked."""
        self.ask(Stop(), Stopped)
        try:
            return self.process.wait(timeout=min(self.timeout, GRACE))
        except subprocess.TimeoutExpired:
            raise ProgramTimeout("answered 'stop' and did not end") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it at once, if it has not ended, and what it started."""
        if self.is_running:
            end_group(self.process)
        self.close_pipes()

    def close_pipes(self) -> None:
        """Lets go of what the process held; a pipe that a thread is still busy with would block, and is left."""
        stdin, stdout = self.process.stdin, self.process.stdout
        for pipe in (stdin if self.has_ended(self.sender) else None, stdout if self.has_ended(self.reader) else None):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:
                continue  # what was not sent will not be read
        self.errors.close()

    def has_ended(self, thread: threading.Thread | None) -> bool:
        """Whether a thread has come to its end, within the time of grace; a reader may wait for room."""
        for _ in range(int(GRACE / TICK)):
            if thread is None or not thread.is_alive():
                return True
            self.drain()
            thread.join(TICK)
        return False

    def drain(self) -> None:
        """Forgets what was said and not read."""
        try:
            while True:
                self.lines.get_nowait()
        except queue.Empty:
            return


class Sender(threading.Thread):
    """Writes to a pipe beside the caller, who may stop waiting: a program that reads nothing blocks the writer."""

    def __init__(self, pipe: IO[bytes] | None, data: bytes) -> None:
        super().__init__(daemon=True)
        assert pipe is not None
        self.pipe, self.data, self.failed = pipe, data, False
        self.start()

    def run(self) -> None:
        try:
            self.pipe.write(self.data)
            self.pipe.flush()
        except (OSError, ValueError):  # closed at the other end, or at ours
            self.failed = True


def asked_timeout() -> float:
    """Seconds that a program has for one answer. Raises ValueError where the variable is not a positive number."""
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{TIMEOUT_VARIABLE} is {text!r}, but must be a number of seconds")
    return seconds


def end_with_parent() -> None:
    """In the child, before it becomes the program: ask Linux for SIGKILL when the worker that started it ends."""
    assert LIBC is not None
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def tag_of(message: Request | Reply) -> str:
    """A message's type as it travels."""
    return str(message.__struct_config__.tag)


def one_line(text: str) -> str:
    """A text without line breaks, and not endless."""
    return " ".join(text.split())[:300]


def excerpt(line: bytes) -> str:
    """The beginning of an answer, quoted."""
    text = line.decode(errors="replace").strip()
    return repr(text[:SHOWN]) + ("..." if len(text) > SHOWN else "")


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Where tensors change hands: in memory where the system has such a place."""
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="attnconform-exec-", dir=shared if os.access(shared, os.W_OK) else None)
