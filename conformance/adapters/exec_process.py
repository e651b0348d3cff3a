"""`exec:COMMAND`: a backend in a program of its own, in whatever language, which speaks the protocol of PROTOCOL.md.

The program is started again after it died, hung or spoke nonsense, so that one case's fault is not the next one's.
"""

from pathlib import Path

import torch

from attnconform.conformance.backend import Backend, Backward, Forward, Tensors, Unavailable
from attnconform.conformance.exec.messages import BackwardRequest, Ran, Refused, RunRequest, describe
from attnconform.conformance.exec.program import Program, ProgramError, scratch_folder
from attnconform.conformance.views import ProblemView

PREFIX = "exec:"
DSCORE = "dscore_"


class ExecRefused(ValueError):
    """The program refused; the text is its own."""

    def __init__(self, clause: str, message: str) -> None:
        super().__init__(f"{message} [{clause}]")
        self.clause = clause


class ExecBackend(Backend):
    """Asks a program. Raises Unavailable without safetensors, ProgramError or OSError where it does not start."""

    refusals = (ExecRefused,)

    def __init__(self, device: str = "cpu", *, command: str) -> None:
        super().__init__(device)
        try:
            from attnconform.conformance.exec import tensors
        except ModuleNotFoundError as missing:
            raise Unavailable(f"{PREFIX} needs {missing.name}: pip install 'attnconform[exec]'") from None
        self.files = tensors
        self.command = command
        self.__dict__["name"] = PREFIX + command  # one class, as many names as programs
        self.program: Program | None = Program(command, device=device)
        self.capabilities = self.program.capabilities
        self.started = self.program.started
        self.folder = scratch_folder()
        self.asked = 0

    def versions(self) -> dict[str, str]:
        return super().versions() | {"program": self.started.name} | dict(self.started.versions)

    def close(self) -> None:
        """Stops the program; one that will not stop is ended."""
        if self.program is not None and self.program.is_running:
            try:
                self.program.stop()
            except ProgramError:
                self.program.kill()
        self.program = None
        self.folder.cleanup()

    def running(self) -> Program:
        """The program, started again where it has ended."""
        if self.program is None or not self.program.is_running:
            self.program = Program(self.command, device=self.device)
        return self.program

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        wanted = {"out": (tuple(tensors.out.shape), tensors.out.dtype)}
        if self.capabilities.returns_lse:
            wanted["lse"] = (tuple(tensors.lse.shape), torch.float32)
        inputs, outputs = self.paths()
        self.files.write_inputs(inputs, problem.spec, tensors)
        request = RunRequest(
            id=self.asked,
            problem=describe(problem.spec, problem.hints),
            inputs=str(inputs),
            outputs=str(outputs),
        )
        ran = self.ask(request)
        found = self.files.read_outputs(outputs, wanted)
        tensors.out.copy_(found["out"])
        if "lse" in found:
            tensors.lse.copy_(found["lse"])
        return Forward(tensors.out, tensors.lse if "lse" in found else None, path=ran.path)

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        if not self.capabilities.has_backward:
            raise NotImplementedError("the program declares no backward, and is never asked for one")
        inputs, outputs = self.paths()
        given = {"out": forward.out, "lse": forward.lse, "dout": dout, "dlse": dlse}
        self.files.write_inputs(inputs, problem.spec, tensors, **given)
        request = BackwardRequest(
            id=self.asked,
            problem=describe(problem.spec, problem.hints),
            inputs=str(inputs),
            outputs=str(outputs),
        )
        self.ask(request)
        found = self.files.read_outputs(outputs, self.gradients_wanted(problem, tensors))
        found = {name: tensor.to(self.device) for name, tensor in found.items()}
        dscore = tuple(found[f"{DSCORE}{i}"] for i in range(len(problem.spec.score_rules)) if f"{DSCORE}{i}" in found)
        return Backward(
            dq=found["dq"],
            dk=found["dk"],
            dv=found["dv"],
            dsink=found.get("dsink"),
            dscore=dscore if self.capabilities.score_gradients else None,
        )

    def gradients_wanted(
        self, problem: ProblemView, tensors: Tensors
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of every gradient; float32 where it belongs to a parameter."""
        wanted = {
            name: (tuple(like.shape), tensors.q.dtype)
            for name, like in (("dq", tensors.q), ("dk", tensors.k_cache), ("dv", tensors.v_cache))
        }
        if problem.spec.sink_logits is not None:
            wanted["dsink"] = ((problem.spec.num_qo_heads,), torch.float32)
        if self.capabilities.score_gradients:
            for i, rule in enumerate(problem.spec.score_rules):
                wanted[f"{DSCORE}{i}"] = (parameter_shape(rule), torch.float32)
        return wanted

    def paths(self) -> tuple[Path, Path]:
        """Fresh files for one call."""
        self.asked += 1
        folder = Path(self.folder.name)
        for old in folder.iterdir():
            old.unlink()
        return folder / f"{self.asked}-inputs.safetensors", folder / f"{self.asked}-outputs.safetensors"

    def ask(self, request: RunRequest | BackwardRequest) -> Ran:
        """The program's answer. Raises ExecRefused where it refuses, ProgramError where it does worse."""
        program = self.running()
        reply = program.answer(request)
        if isinstance(reply, Refused):
            raise ExecRefused(reply.clause, reply.message)
        if not isinstance(reply, Ran):
            raise program.misplaced(reply, request)
        return reply


def parameter_shape(rule: object) -> tuple[int, ...]:
    """The shape of a score rule's parameters: slopes, tables, or one cap."""
    if (tables := getattr(rule, "tables", None)) is not None:
        return len(tables), len(tables[0])
    slopes = getattr(rule, "slopes", None)
    return () if slopes is None else (len(slopes),)
