"""Does a program speak the protocol? Its numbers are not judged here: that is `attnconform run -b exec:COMMAND`."""

from collections.abc import Callable, Iterable
from pathlib import Path

from attnconform.conformance.adapters.declaration import faults_of
from attnconform.conformance.adapters.exec_process import ExecBackend, ExecRefused
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.exec.messages import Failed, Ran, RunRequest, describe
from attnconform.conformance.exec.program import Program, ProgramError, ProgramFailed
from attnconform.conformance.judge.judge import undeclared
from attnconform.conformance.judge.refusal import corrupted_tensors
from attnconform.conformance.judge.storage import store_inputs
from attnconform.conformance.judge.trial import BackendCrash, Trial

NO_REQUESTS = {"a request of an unknown type": b'{"type":"no-such-request"}', "a line that is no JSON": b"{type: run"}


def check_program(command: str, *, device: str = "cpu") -> list[str]:
    """What is wrong with how a program speaks, a line each; nothing where it speaks the protocol."""
    try:
        backend = ExecBackend(device, command=command)
    except (ProgramError, OSError, ValueError) as error:
        return [f"start: {error}"]
    try:
        steps: tuple[Callable[[ExecBackend], Iterable[str]], ...] = (
            check_words, check_nonsense, check_missing_file, check_forward, check_refusals, check_backward, check_stop,
            check_end_of_input,
        )  # fmt: skip
        return [f"{step.__name__.removeprefix('check_')}: {fault}" for step in steps for fault in step(backend)]
    finally:
        backend.close()


def check_words(backend: ExecBackend) -> Iterable[str]:
    """Axes, values and dtypes of the declaration are those that there are."""
    yield from faults_of(backend.capabilities)


def check_nonsense(backend: ExecBackend) -> Iterable[str]:
    """What is no request is answered with `failed`, and the program goes on."""
    for name, line in NO_REQUESTS.items():
        try:
            reply = backend.running().exchange_line(line, name)
        except ProgramError as error:
            yield f"{name}: {error}"
            continue
        if not isinstance(reply, Failed):
            yield f"{name} was answered with {reply}, but must be with failed"


def check_missing_file(backend: ExecBackend) -> Iterable[str]:
    """Inputs that cannot be read are answered with `failed`."""
    case = first_declared(backend, "forward")
    if case is None:
        return
    trial = Trial(case, backend)
    inputs, outputs = backend.paths()
    problem = describe(trial.problem, trial.view.hints)
    request = RunRequest(id=backend.asked, problem=problem, inputs=str(inputs), outputs=str(outputs))
    try:
        backend.running().ask(request, Ran)
        yield "a run without an inputs file was answered with ran"
    except ProgramFailed:
        return
    except ProgramError as error:
        yield f"a run without an inputs file: {error}"


def check_forward(backend: ExecBackend) -> Iterable[str]:
    """A plain run gives outputs of the agreed names, shapes and dtypes, and leaves its inputs file alone."""
    case = first_declared(backend, "forward")
    if case is None:
        yield "declares none of the plain forward cases of L0"
        return
    try:
        Trial(case, backend).run(Trial(case, backend).values, unowned=0.0)
    except BackendCrash as crash:
        yield str(crash)
        return
    before = inputs_of(backend).read_bytes()
    request = RunRequest(
        id=backend.asked,
        problem=describe(Trial(case, backend).problem, Trial(case, backend).view.hints),
        inputs=str(inputs_of(backend)),
        outputs=str(inputs_of(backend).with_name("again.safetensors")),
    )
    try:
        backend.running().ask(request, Ran)
    except ProgramError as error:
        yield f"the same run again: {error}"
        return
    if inputs_of(backend).read_bytes() != before:
        yield "the inputs file was changed"


def check_refusals(backend: ExecBackend) -> Iterable[str]:
    """What is declared to be refused is refused in one line with a clause, and nothing is written."""
    for case in matrix("L1"):
        if case.operation != "refusal" or undeclared(case, backend) is not None:
            continue
        trial = Trial(case, backend)
        q, k, v = corrupted_tensors(trial)
        tensors, _ = store_inputs(case.structure, trial.problem, q, k, v, device=backend.device, poison=0.0)
        try:
            backend.forward(trial.view, tensors)
            yield f"{case.id} was not refused"
        except ExecRefused as refusal:
            if "\n" in str(refusal) or not refusal.clause:
                yield f"{case.id} was refused in more than a line, or without a clause"
            if len(list(Path(backend.folder.name).iterdir())) > 1:
                yield f"{case.id} was refused after outputs were written"
        except ProgramError as error:
            yield f"{case.id}: {error}"


def check_backward(backend: ExecBackend) -> Iterable[str]:
    """A backward, where it is declared, gives gradients of the agreed names, shapes and dtypes."""
    if not backend.capabilities.has_backward:
        return
    case = first_declared(backend, "backward", level="L1")
    if case is None:
        yield "declares a backward, but none of the backward cases of L1"
        return
    try:
        Trial(case, backend).run_backward(Trial(case, backend).values)
    except BackendCrash as crash:
        yield str(crash)


def check_stop(backend: ExecBackend) -> Iterable[str]:
    """It answers stop and ends with exit code 0."""
    program: Program = backend.running()
    try:
        code = program.stop()
    except ProgramError as error:
        yield str(error)
        return
    if code:
        yield f"ended with exit code {code}"


def check_end_of_input(backend: ExecBackend) -> Iterable[str]:
    """Started again, it ends by itself at the end of its input."""
    try:
        backend.running().end_input()
    except ProgramError as error:
        yield str(error)


def inputs_of(backend: ExecBackend) -> Path:
    """The inputs file of the latest call."""
    return Path(backend.folder.name) / f"{backend.asked}-inputs.safetensors"


def first_declared(backend: ExecBackend, operation: str, level: str = "L0") -> Case | None:
    """The first case of an operation that a backend declares."""
    return next((c for c in matrix(level) if c.operation == operation and undeclared(c, backend) is None), None)
