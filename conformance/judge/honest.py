"""How tight the bounds are on honest kernels: emulated ones, a million elements and more, and never a false FAIL.

A worst-case bound that an honest kernel exceeds is wrong. A bound that no honest kernel comes near is slack, and hides
mistakes of its own size. Both are measured here by the number of keys, on random and designed inputs. [BOUND-OUT]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import msgspec
import numpy as np

from attnconform.conformance.bounds.block import Array, AttentionBlock
from attnconform.conformance.bounds.emulate import Schedule, emulate_forward
from attnconform.conformance.bounds.forward import forward_bounds
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.conformance.cases.structure import Dtype
from attnconform.conformance.cases.values import EXTREME_SCORE, FAR_SCORE, LANE_SCORE, round_to
from attnconform.reference import philox

CLASS_OF: dict[Dtype, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
FAMILIES = (
    "normal", "peaked", "zero_q", "equal_keys", "v_mean", "half_mass", "extreme", "far_key", "zero_lane",
)  # fmt: skip
NUM_KEYS = (1, 2, 3, 16, 17, 64, 257, 1024)
ROWS, HEAD_DIM = 32, 64
VISIBLE = 0.7  # share of its keys that a row sees
SLACK = 0.1  # usage below which a probable bound hides more than it must
SEED = 0x40_0E57


@dataclass(frozen=True)
class Choice:
    """What an honest kernel is free to choose, with the declaration that goes with it."""

    schedule: Schedule
    declared: dict[str, int]


CHOICES = (
    Choice(Schedule(tile=64), {}),
    Choice(Schedule(tile=16, splits=3, exp2=True, exp_bias=3.0), {"num_splits": 3}),
    Choice(Schedule(tile=128, splits=8, exp_bias=-3.0), {"num_splits": 8}),
    Choice(Schedule(tile=32, exp2=True), {"l_from_p": True}),
)


class Usage(msgspec.Struct, kw_only=True):
    """Largest error / bound over so many elements."""

    comparisons: int = 0
    false_fails: int = 0  # elements past the worst-case bound
    past_probable: int = 0
    worst: float = 0.0
    probable: float = 0.0

    def add(self, error: Array, worst: Array, probable: Array) -> None:
        """Counts elements; one that is exact uses none of its bound."""
        of_worst, of_probable = ratio(error, worst), ratio(error, probable)
        self.comparisons += error.size
        self.false_fails += int((of_worst > 1).sum())
        self.past_probable += int((of_probable > 1).sum())
        self.worst = max(self.worst, float(of_worst.max(initial=0.0)))
        self.probable = max(self.probable, float(of_probable.max(initial=0.0)))


class Honesty(msgspec.Struct, kw_only=True):
    """One dtype: all comparisons together, and by number of keys, output and family of inputs."""

    dtype: Dtype
    total: Usage
    by_keys: dict[int, dict[str, Usage]]  # number of keys -> output -> usage
    by_family: dict[str, Usage]

    @property
    def is_honest(self) -> bool:
        return self.total.false_fails == 0

    @property
    def slack(self) -> dict[str, list[int]]:
        """Numbers of keys at which an output errs, and never by a tenth of its probable bound."""
        return {
            name: [keys for keys, by in self.by_keys.items() if 0 < by[name].probable < SLACK]
            for name in ("out", "lse")
        }


def ratio(error: Array, bound: Array) -> Array:
    """error / bound; 0 for an exact element and for one without a bound, inf where a bound of 0 is missed."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((error == 0) | np.isinf(bound), 0.0, np.where(np.isnan(error), np.inf, error / bound))


def compare_honest(dtype: Dtype, comparisons: int) -> Iterator[Honesty]:
    """Goes on until so many elements are compared; gives the same record again after every block."""
    found = Honesty(
        dtype=dtype,
        total=Usage(),
        by_keys={keys: {"out": Usage(), "lse": Usage()} for keys in NUM_KEYS},
        by_family={family: Usage() for family in FAMILIES},
    )
    for number in count():
        keys = NUM_KEYS[number % len(NUM_KEYS)]
        family = FAMILIES[number // len(NUM_KEYS) % len(FAMILIES)]
        choice = CHOICES[(number // len(NUM_KEYS)) % len(CHOICES)]
        compare_block(found, build_block(dtype, family, keys, SEED + number), choice, family, keys)
        yield found
        if found.total.comparisons >= comparisons and number + 1 >= len(NUM_KEYS) * len(FAMILIES):
            return


def compare_block(found: Honesty, block: AttentionBlock, choice: Choice, family: str, keys: int) -> None:
    """One emulated kernel on one block, out and lse."""
    numerics: Numerics = msgspec.structs.replace(NUMERICS_CLASSES[CLASS_OF[found.dtype]], **choice.declared)
    got, bounds = emulate_forward(block, numerics, choice.schedule), forward_bounds(block, numerics)
    out, lse = exact_forward(block)
    with np.errstate(invalid="ignore"):  # a row that sees nothing has an lse of -inf on both sides
        lse_error = np.where(got.lse == lse, 0.0, np.abs(got.lse - lse))
    for name, error, worst, probable in (
        ("out", np.abs(got.out - out), bounds.out_worst, bounds.out_prob),
        ("lse", lse_error, bounds.lse_worst, bounds.lse_prob),
    ):
        for usage in (found.total, found.by_keys[keys][name], found.by_family[family]):
            usage.add(error, worst, probable)


def exact_forward(block: AttentionBlock) -> tuple[Array, Array]:
    """out and lse in float64."""
    scores = np.where(block.mask, block.scores, -np.inf)
    row_max = scores.max(1, keepdims=True, initial=-np.inf)
    row_max = np.where(np.isfinite(row_max), row_max, 0.0)
    weights = np.exp(scores - row_max)
    total = weights.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights @ block.v / np.where(total > 0, total, 1), (row_max + np.log(total))[:, 0]


def build_block(dtype: Dtype, family: str, keys: int, seed: int) -> AttentionBlock:
    """Rows and keys of one family; a row sees most of its keys, the first sees all of them."""
    sm_scale = HEAD_DIM**-0.5
    q, k, v = (philox.normal(seed, i, (n, HEAD_DIM)) for i, n in enumerate((ROWS, keys, keys)))
    mask = philox.uniform(seed, 3, (ROWS, keys)) < VISIBLE
    mask[0] = True
    q, k, v = (round_to(x, dtype) for x in shaped(family, q, k, v, sm_scale))
    return AttentionBlock(q=q, k=k, v=v, mask=mask, scores=sm_scale * (q @ k.T), sm_scale=sm_scale)


def shaped(family: str, q: Array, k: Array, v: Array, sm_scale: float) -> tuple[Array, Array, Array]:
    """Normal numbers bent into a family: the same families as the matrix has."""
    scores = {
        "half_mass": (float(np.log(max(len(k), 2))), 0.0),
        "extreme": (EXTREME_SCORE, -EXTREME_SCORE),
        "far_key": (FAR_SCORE, 0.0),
        "zero_lane": (LANE_SCORE, LANE_SCORE),
    }
    if family not in scores:
        return {
            "normal": (q, k, v),
            "peaked": (4 * q, k, v),
            "zero_q": (0 * q, k, v),
            "equal_keys": (q, np.broadcast_to(k[:1], k.shape), v),
            "v_mean": (q, k, 1 + v / 8),
        }[family]
    first, other = scores[family]
    along = np.sqrt(abs(first) / sm_scale)
    new_q, new_k = np.zeros_like(q), np.zeros_like(k)
    new_q[:, 0], new_q[:, 1] = along, q[:, 1]
    new_k[:, 0], new_k[:, 1] = other / (sm_scale * along), k[:, 1]
    new_k[0, 0] = first / (sm_scale * along)
    return new_q, new_k, v
