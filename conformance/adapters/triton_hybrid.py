"""The bundled kernels with a hybrid backward: hot pages gathered, cold ones added to."""

from functools import partial
from typing import Any

from attnconform.conformance.adapters.triton_kernels import TritonAtomic

REUSE_THRESHOLD = 3  # so low that cases of a few rows have pages of both kinds


def hybrid_backward(kernels: Any, plan: Any, *inputs: Any, mode: str, **options: Any) -> Any:
    """The kernels' backward over work planned with this threshold."""
    hints = kernels.BackwardHints(mode=mode, reuse_threshold=REUSE_THRESHOLD)
    return kernels.backward(plan, *inputs, work=kernels.plan_backward(plan, hints), **options)


class TritonHybrid(TritonAtomic):
    """The same kernels and the same edges; cold pages are summed in any order, as in the atomic backward."""

    name = "triton-hybrid"
    backward_mode = "hybrid"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.backward_kernel = partial(hybrid_backward, self.kernels)
