"""Tolerance policies as other projects publish them, to be measured on the same mistakes as the judge.

Each is the rule of a project's own tests or benchmark harness, retold from its source: it sees an output, the exact
one and what a plain low-precision implementation gives, and accepts or rejects. None of them looks at lse.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnconform.conformance.cases.structure import Dtype
from attnconform.conformance.cases.values import round_to
from attnconform.reference.coordinates import FloatArray

# torch.testing.assert_close: (rtol, atol) of each dtype
TORCH_DEFAULTS: dict[Dtype, tuple[float, float]] = {
    "float32": (1.3e-6, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float16": (1e-3, 1e-5),
}
FLASH_NOISE = 0.3  # added and taken away again: what is lost is the noise of the format
FLA_RATIO, FLA_ABSOLUTE = 0.005, 1e-6
FLA_CI_RATIO, FLA_CI_ABSOLUTE = 0.01, 0.3


@dataclass(frozen=True)
class Sample:
    """One output before a policy; three arrays of one shape."""

    observed: FloatArray
    oracle: FloatArray
    baseline: FloatArray  # a textbook implementation with every matrix stored in the dtype
    dtype: Dtype


@dataclass(frozen=True)
class Policy:
    """A published way to decide whether an output is right."""

    name: str
    source: str
    accepts: Callable[[Sample], bool]


def accepts_allclose(sample: Sample) -> bool:
    """Every element within 1e-2 absolute plus 1e-2 relative."""
    return bool(np.allclose(sample.observed, sample.oracle, rtol=1e-2, atol=1e-2))


def accepts_torch_defaults(sample: Sample) -> bool:
    """Every element within the dtype's default tolerances."""
    rtol, atol = TORCH_DEFAULTS[sample.dtype]
    return bool(np.allclose(sample.observed, sample.oracle, rtol=rtol, atol=atol))


def accepts_twice_the_baseline(sample: Sample) -> bool:
    """The largest error is at most twice the baseline's, and twice the noise of adding 0.3 and taking it away."""
    stored = round_to(sample.oracle, sample.dtype)
    noisy = round_to(round_to(stored + FLASH_NOISE, sample.dtype) - FLASH_NOISE, sample.dtype)
    allowed = 2 * largest(sample.baseline - sample.oracle) + 2 * largest(noisy - stored)
    return largest(sample.observed - sample.oracle) <= allowed


def accepts_rms_ratio(sample: Sample) -> bool:
    """The root mean square of the error is below 0.5 % of the oracle's."""
    return largest(sample.observed - sample.oracle) <= FLA_ABSOLUTE or rms_ratio(sample) < FLA_RATIO


def accepts_rms_ratio_in_ci(sample: Sample) -> bool:
    """Under the CI switch a ratio below 1 % or a largest error up to 0.3 only warns."""
    if rms_ratio(sample) < FLA_CI_RATIO or largest(sample.observed - sample.oracle) <= FLA_CI_ABSOLUTE:
        return True
    return accepts_rms_ratio(sample)


def accepts_absolute_or_relative(sample: Sample) -> bool:
    """An element is wrong only where its absolute and its relative error both exceed 1e-2."""
    if not np.isfinite(sample.observed).all():
        return False
    error = np.abs(sample.observed - sample.oracle)
    return not bool(((error > 1e-2) & (error / (np.abs(sample.oracle) + 1e-8) > 1e-2)).any())


def largest(error: FloatArray) -> float:
    """The largest magnitude; NaN if there is one."""
    return float(np.abs(error).max(initial=0.0))


def rms_ratio(sample: Sample) -> float:
    """Root mean square of the error over that of the oracle."""
    error, scale = (
        float(np.sqrt(np.mean(x**2))) if x.size else 0.0 for x in (sample.observed - sample.oracle, sample.oracle)
    )
    return error / (scale + 1e-8)


POLICIES: tuple[Policy, ...] = (
    Policy("allclose 1e-2", "BackendBench, KernelBench for 16-bit dtypes", accepts_allclose),
    Policy("torch.testing defaults", "torch.testing.assert_close", accepts_torch_defaults),
    Policy("2x baseline", "Dao-AILab/flash-attention tests", accepts_twice_the_baseline),
    Policy("RMS ratio 0.005", "flash-linear-attention assert_close", accepts_rms_ratio),
    Policy("RMS ratio 0.005, CI switch", "flash-linear-attention with FLA_CI_ENV=1", accepts_rms_ratio_in_ci),
    Policy("abs and rel > 1e-2", "flashinfer-bench default evaluator", accepts_absolute_or_relative),
)
