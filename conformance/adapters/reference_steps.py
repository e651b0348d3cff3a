"""The reference behind the backend interface: what faithful variants and deviations are variations of."""

from typing import ClassVar

import numpy as np
import torch

from attnconform.conformance.backend import OPTIONAL_AXES, Backend, Backward, Capabilities, Forward, Tensors, Whole
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES
from attnconform.conformance.views import ProblemView
from attnconform.reference.attention import check_tensors
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.steps import AttentionResult, Gradients, Steps


class StepsBackend(Backend):
    """Steps in float64, rounded once when stored."""

    name = "reference"
    steps: ClassVar[Steps] = Steps()
    capabilities = Capabilities(
        numerics={dtype: NUMERICS_CLASSES[name] for dtype, name in (("bfloat16", "bf16"), ("float16", "fp16"))},
        tolerates_nonfinite=True,
        checks_owner=True,
        supported={axis: Whole() for axis in OPTIONAL_AXES},
        score_gradients=True,
        quantized_backward=True,
    )

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        q, k, v = self.inputs(problem, tensors)
        check_tensors(problem.spec, q, k, v)
        result = self.steps.forward(problem.spec, q, k, v)
        self.store(tensors, result)
        return Forward(tensors.out, tensors.lse, path="native", saved=result)

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        """Writes the result where the caller wants it, rounding to the storage dtype."""
        tensors.out.copy_(torch.from_numpy(result.out))
        tensors.lse.copy_(torch.from_numpy(result.lse))

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        q, k, v = self.inputs(problem, tensors)
        saved: AttentionResult = forward.saved
        to_lse = None if dlse is None else to_float64(dlse)
        return self.pack(problem, tensors, self.steps.backward(problem.spec, q, k, v, saved, to_float64(dout), to_lse))

    def pack(self, problem: ProblemView, tensors: Tensors, gradients: Gradients) -> Backward:
        """Gradients in the storage dtype and the cache's layout."""
        dtype = tensors.q.dtype
        dk, dv = gradients.in_pool(problem.spec.cache.num_slots)
        return Backward(
            dq=torch.from_numpy(gradients.dq).to(dtype),
            dk=problem.to_cache(torch.from_numpy(dk).to(dtype)),
            dv=problem.to_cache(torch.from_numpy(dv).to(dtype)),
            dsink=None if gradients.dsink is None else torch.from_numpy(gradients.dsink).to(torch.float32),
            dscore=tuple(torch.from_numpy(x).to(torch.float32) for x in gradients.dscore),
        )

    def inputs(self, problem: ProblemView, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        """q, and k and v by slot, in float64."""
        k, v = problem.by_slot(tensors.k_cache), problem.by_slot(tensors.v_cache)
        return to_float64(tensors.q), to_float64(k), to_float64(v)


def to_float64(tensor: torch.Tensor) -> FloatArray:
    """A tensor's numbers as float64 in numpy; exact for every storage dtype."""
    return np.asarray(tensor.detach().to(torch.float64).cpu().numpy())
