"""Miniature backends that misbehave in one way each, as a module that other processes can import."""

import textwrap

import pytest

MINIATURES = textwrap.dedent(
    '''
    """Backends that are right but for one thing, on the cases that have a mask rule."""

    import os
    import time

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
