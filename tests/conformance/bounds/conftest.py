"""Inputs on which bounds are tried, and the exact answers beside them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from attnconform.conformance.bounds import NUMERICS_CLASSES, AttentionBlock, Numerics, backward_bounds, forward_bounds
from attnconform.conformance.bounds.oracle import oracle_error, oracle_gradient_error

FAMILIES = (
    "normal",
    "q_times_4",
    "q_zero",
    "half_mass",
    "offset_5e4",
    "v_mean_1",
    "equal_keys",
    "one_key_at_minus_524288",
)
OUTPUTS = ("out", "lse", "dq", "dk", "dv")


def draw(seed: int, *shape: int) -> np.ndarray:
    """Nearly normal numbers that no library version changes: splitmix64, sums of twelve uniforms, rounded to bf16."""
    with np.errstate(over="ignore"):
        state = np.arange(1, 12 * int(np.prod(shape)) + 1, dtype=np.uint64) + np.uint64(seed * 2**32)
        mixed = state * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    uniform = (mixed >> np.uint64(40)).astype(np.float64) / 2**24
    return round_bf16(uniform.reshape(*shape, 12).sum(-1) - 6)


def round_bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


@dataclass(frozen=True)
class Case:
    """A block, its upstream gradient and exact answers."""

    block: AttentionBlock
    do: np.ndarray
    dlse: np.ndarray | None = None

    def with_block(self, **changes: object) -> "Case":
        return replace(self, block=replace(self.block, **changes))

    def exact(self) -> dict[str, np.ndarray]:
        """float64 answers, written down without regard to the code under test."""
        block, do = self.block, self.do
        scores, v, slope, keep = np.where(block.mask, block.scores, -np.inf), block.v, block.slope, block.dropout
        slope = np.ones_like(scores) if slope is None else slope
        keep = np.ones_like(scores) if keep is None else keep
        sink = np.full(len(scores), -np.inf) if block.sink is None else block.sink
        row_max = np.maximum(scores.max(1, initial=-np.inf), sink)
        row_max = np.where(np.isfinite(row_max), row_max, 0.0)[:, None]
        p, p_sink = np.exp(scores - row_max), np.exp(sink[:, None] - row_max)
        total = p.sum(1, keepdims=True) + p_sink
        with np.errstate(divide="ignore"):
            lse = row_max + np.log(total)
        p, p_sink = (np.where(total > 0, x / np.where(total > 0, total, 1), 0.0) for x in (p, p_sink))
        out = (p * keep) @ v
        row_term = (do * out).sum(1) - (0.0 if self.dlse is None else self.dlse)
        ds = p * slope * ((do @ v.T) * keep - row_term[:, None])
        return {
            "out": out,
            "lse": lse[:, 0],
            "dq": block.sm_scale * ds @ block.k,
            "dk": block.sm_scale * ds.T @ block.q,
            "dv": (p * keep).T @ do,
            "dsink": self.sum_heads(-p_sink[:, 0] * row_term),
        }

    def sum_heads(self, rows: np.ndarray) -> np.ndarray:
        """A sink's gradient is the sum over the rows of its head."""
        return rows.reshape(self.block.num_heads, -1).sum(1)

    def bounds(self, numerics: Numerics) -> dict[str, np.ndarray]:
        """Every bound under one flat name, such as dq_worst."""
        forward = forward_bounds(self.block, numerics)
        backward = backward_bounds(self.block, self.do, numerics, forward, self.dlse)
        names = [f"{output}_{form}" for output in OUTPUTS for form in ("worst", "prob")]
        sinks = {"dsink_worst": backward.dsink.worst, "dsink_prob": backward.dsink.probable}
        return {name: getattr(forward if hasattr(forward, name) else backward, name) for name in names} | sinks

    def oracle(self) -> dict[str, np.ndarray]:
        """How far the float64 answers may be off themselves."""
        out, lse = oracle_error(forward_bounds(self.block, NUMERICS_CLASSES["float64"]))
        return {"out": out, "lse": lse} | oracle_gradient_error(self.block, self.do, self.dlse)

    def ratios(self, numerics: Numerics, got: dict[str, np.ndarray]) -> dict[str, float]:
        """Largest error / bound of each output and form; an exact element has a ratio of 0."""
        exact, bounds, oracle = self.exact(), self.bounds(numerics), self.oracle()
        ratios = {}
        for name, bound in bounds.items():
            output = name.rsplit("_", 1)[0]
            if output in got:
                same = got[output] == exact[output]
                error = np.abs(np.where(same, 0.0, got[output]) - np.where(same, 0.0, exact[output]))
                bound = bound + oracle[output]
                with np.errstate(divide="ignore"):
                    ratios[name] = float(np.max(np.divide(error, bound, out=np.zeros_like(error), where=error > 0)))
        return ratios


def build_case(family: str, seed: int = 0, *, rows: int = 8, keys: int = 64, head_dim: int = 32) -> Case:
    """One of the designed inputs; most rows see 70 % of the keys, row 0 sees all, row 1 none."""
    q, k, v, do = (draw(4 * seed + i, n, head_dim) for i, n in enumerate((rows, keys, keys, rows)))
    mask = np.abs(draw(900 + seed, rows, keys)) < 1.0
    mask[0], mask[1] = True, False
    unit = np.eye(head_dim)[0]
    if family.startswith("q_"):
        q = q * {"q_times_4": 4, "q_zero": 0}[family]
    elif family == "half_mass":
        q, k = 0 * q + round_bf16(unit * np.log(keys - 1) * head_dim**0.5), 0 * k
        k[keys // 3] = unit
    elif family == "offset_5e4":
        q[:, 0] = k[:, 0] = round_bf16(np.array((5e4 * head_dim**0.5) ** 0.5))
    elif family == "v_mean_1":
        v = round_bf16(v + 1)
    elif family == "equal_keys":
        k[:] = k[0]
    elif family == "one_key_at_minus_524288":
        q[:, 0], k[:, 0] = 1.0, 0.0
        k[3, 0] = round_bf16(np.array(-524288 * head_dim**0.5))
    return case_of(q, k, v, do, mask, head_dim**-0.5)


def case_of(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, mask: np.ndarray, scale: float) -> Case:
    # float32 kernels hold a float32 scale.
    scale = float(np.float32(scale))
    return Case(AttentionBlock(q, k, v, mask, q @ k.T * scale, scale), do)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    return build_case
