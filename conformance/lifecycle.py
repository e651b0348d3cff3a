"""The optional methods through which a backend shows that it plans first and runs later, perhaps many times. [PLAN]

A backend writes those that it has. One without them is judged through forward calls, one after the other.
"""

from typing import TYPE_CHECKING, Any, Protocol

import torch

from attnconform.conformance.views import ProblemView

if TYPE_CHECKING:
    from attnconform.conformance.backend import Forward, Tensors


class Replayable(Protocol):
    """A launch that was captured: it repeats itself, on the same tensors and on the plan's storage as it is now."""

    def replay(self) -> "Forward": ...


class Lifecycle:
    """Steps of a call, each on its own; handles are the backend's."""

    def plan(self, problem: ProblemView, dtype: torch.dtype) -> Any:
        """A handle of everything that runs of the problem need. [PLAN-ALLOCATE, PLAN-COPY, PLAN-APART]"""
        raise NotImplementedError

    def run(self, handle: Any, tensors: "Tensors") -> "Forward":
        """Attention by a plan, of tensors as they are now. [PLAN-ALLOCATE, PLAN-WORKSPACE, PLAN-INPUTS]"""
        raise NotImplementedError

    def replan(self, handle: Any, problem: ProblemView) -> Any:
        """The handle, in the same storage, for a problem that needs no more of anything. [PLAN-REPLAN]"""
        raise NotImplementedError

    def capture(self, handle: Any, tensors: "Tensors") -> Replayable:
        """A run of the handle to be replayed. [PLAN-REPLAY]

        Raises NotImplementedError where the device has no such thing.
        """
        raise NotImplementedError


def offers_steps(backend: object, *methods: str) -> bool:
    """Whether a backend writes all of some optional methods."""
    return all(getattr(type(backend), name, None) not in (None, getattr(Lifecycle, name)) for name in methods)
