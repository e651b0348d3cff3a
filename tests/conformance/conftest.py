"""Miniature backends that misbehave in one way each, as a module that other processes can import."""

import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

EXEC_BACKENDS = Path(__file__).parent / "exec_backend"

MINIATURES = textwrap.dedent(
    '''
    """Backends that are right but for one thing, on the cases that have a mask rule."""

    import ctypes
    import os
    import signal
    import time
    from pathlib import Path

    import torch

    from attnconform.conformance import Capabilities, Forward
    from attnconform.conformance.adapters.reference_steps import StepsBackend


    class Misbehaves(StepsBackend):
        def forward(self, problem, tensors):
            done = super().forward(problem, tensors)
            return self.misbehave(tensors, done) if problem.spec.mask_rule is not None else done


    class Right(StepsBackend):
        name = "right"


    class Dies(Misbehaves):
        def misbehave(self, tensors, done):
            os._exit(11)


    class Hangs(Misbehaves):
        def misbehave(self, tensors, done):
            time.sleep(3600)


    class Raises(Misbehaves):
        def misbehave(self, tensors, done):
            raise RuntimeError("device lost\\nand more lines")


    class Segfaults(Misbehaves):
        def misbehave(self, tensors, done):
            ctypes.string_at(0)


    class Aborts(Misbehaves):
        def misbehave(self, tensors, done):
            os.abort()


    class IsKilled(Misbehaves):
        def misbehave(self, tensors, done):
            os.kill(os.getpid(), signal.SIGKILL)


    class HangsWithTheLock(Misbehaves):
        """Never gives the interpreter's lock back, so that no other thread of Python runs."""

        def misbehave(self, tensors, done):
            ctypes.PyDLL(None).sleep(3600)


    class RunsOutOfMemory(Misbehaves):
        def misbehave(self, tensors, done):
            torch.empty(2**60, dtype=torch.uint8)


    class RunsOutOfDeviceMemory(Misbehaves):
        def misbehave(self, tensors, done):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 GiB")


    class PoisonsTheDevice(Misbehaves):
        """After one fault every later call fails, as in a CUDA context; a fresh process is well again."""

        is_poisoned = False

        def forward(self, problem, tensors):
            if self.is_poisoned:
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            return super().forward(problem, tensors)

        def misbehave(self, tensors, done):
            type(self).is_poisoned = True
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


    class Leaks(Misbehaves):
        kept = []

        def misbehave(self, tensors, done):
            self.kept.append(tensors.out.clone())
            return done


    class DeniesADenseFallback(StepsBackend):
        """Computes every pair in torch where candidates leave few, and calls that its native path."""

        def forward(self, problem, tensors):
            if problem.spec.candidates is not None:
                for n in range(problem.spec.batch_size):
                    q = tensors.q[problem.q_rows(n)].transpose(0, 1).float()
                    k = problem.gathered(tensors.k_cache, n).transpose(0, 1).float()
                    torch.softmax(q @ k.repeat_interleave(problem.spec.group_size, 0).transpose(1, 2), -1)
            return super().forward(problem, tensors)


    class Races(Misbehaves):
        calls = 0

        def misbehave(self, tensors, done):
            self.calls += 1
            tensors.out[0, 0, 0] *= 1 + 2.0**-9 * (self.calls * 7 % 11)
            return done


    class Logs(StepsBackend):
        """Right and slow; says in a file which calls it had."""

        def forward(self, problem, tensors):
            time.sleep(0.2)
            with Path("calls.log").open("a") as log:
                log.write("call\\n")
            return super().forward(problem, tensors)


    class WritesOutside(Misbehaves):
        def misbehave(self, tensors, done):
            flat = tensors.out.as_strided((1,), (1,), tensors.out.storage_offset() + tensors.out.numel())
            flat.zero_()
            return done


    class MutatesItsInput(Misbehaves):
        def misbehave(self, tensors, done):
            tensors.q.mul_(2)
            return done


    class GivesNan(Misbehaves):
        def misbehave(self, tensors, done):
            tensors.out[0, 0, 0] = float("nan")
            return done


    class LeavesARow(Misbehaves):
        def forward(self, problem, tensors):
            kept = tensors.out[-1].clone()
            done = super().forward(problem, tensors)
            if problem.spec.mask_rule is not None:
                tensors.out[-1] = kept
            return done

        def misbehave(self, tensors, done):
            return done


    class HidesAFallback(Misbehaves):
        def misbehave(self, tensors, done):
            return Forward(done.out, done.lse, path="fallback: dense", saved=done.saved)


    class DropsAKey(Misbehaves):
        def misbehave(self, tensors, done):
            tensors.out.zero_()
            return done


    class RunsNothing(StepsBackend):
        from attnconform.conformance import OneOf
        capabilities = Capabilities(supported={"dtype": OneOf(())})


    class DiesInWorkers(StepsBackend):
        def __init__(self, device="cpu"):
            super().__init__(device)
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(5)


    class FailsToStart(StepsBackend):
        def __init__(self, device="cpu"):
            raise OSError("no licence\\nfound")


    NOT_A_BACKEND = 3
    '''
)


@pytest.fixture
def miniatures(tmp_path, monkeypatch):
    """A folder with miniatures.py, which is the current one."""
    (tmp_path / "miniatures.py").write_text(MINIATURES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def attention_program(tmp_path_factory):
    """The backend in C++, built: the command that starts it."""
    program = tmp_path_factory.mktemp("exec") / "attention"
    source = EXEC_BACKENDS / "attention.cpp"
    subprocess.run(["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, source], check=True)
    return str(program)


@pytest.fixture(scope="session")
def onnx_program():
    """The backend in ONNX Runtime: the command that starts it."""
    return shlex.join([sys.executable, str(EXEC_BACKENDS / "onnx_attention.py")])


@pytest.fixture(scope="session")
def spoilt_program(attention_program):
    """The command of the backend in C++ behind a program that misbehaves, where there is a mask rule, in one way."""

    def command(mode):
        return shlex.join([sys.executable, str(EXEC_BACKENDS / "spoilt.py"), mode, attention_program])

    return command
