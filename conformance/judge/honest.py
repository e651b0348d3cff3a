"""How tight the bounds are on honest kernels: emulated ones, a million elements and more, and never a false FAIL.

A worst-case bound that an honest kernel exceeds is wrong. A bound that no honest kernel comes near is slack, and hides
mistakes of its own size. Both are measured here for every output, by the number of keys and by what is declared, on
random and designed inputs. [BOUND-OUT] [BOUND-GRAD] [BOUND-RULE]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import msgspec
import numpy as np

from attnconform.conformance.bounds.block import Array
from attnconform.conformance.cases.structure import Dtype
from attnconform.conformance.judge.honest_cases import FAMILIES, FEATURES, build_case
from attnconform.conformance.judge.honest_classes import HONEST_CLASSES
from attnconform.conformance.judge.honest_outputs import OUTPUTS, Judged, judge_honest

NUM_KEYS = (1, 2, 3, 16, 17, 64, 257, 1024, 4096, 16384, 65536)
LONG_FAMILIES = ("normal", "zero_q", "half_mass", "extreme", "v_mean")  # as many as features
SLACK = 0.1  # usage below which a probable bound hides more than it must
# What sees a mistake that hides under the bound of an output, where that bound is slack.
COVERED_BY = {
    "out": "the membership probe and, from some hundreds of keys on, lse with q = 0 see it",
    "lse": "q = 0, where lse counts keys, and the membership probe see it",
    "dq": "dk, made of the same dS, and the edges of dv see it",
    "dk": "the edges of dv (q = 0, one-hot dO) and GRAD-ZERO see it",
    "dv": "the edges of dv (q = 0, one-hot dO) and GRAD-ZERO see it",
    "dsink": "lse and dq see a sink's weight, and a sink's gradient is few numbers: a draw of few errors",
    "dscore": "dq and dk see the dS that it is made of, and it is few numbers: a draw of few errors",
}
SEED = 0x40_0E57


@dataclass(frozen=True)
class Size:
    """Rows and head dim of a block."""

    rows: int
    head_dim: int


SHORT, LONG, LONGEST = Size(32, 64), Size(8, 32), Size(4, 16)


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


Usages = dict[str, Usage]  # by output


class Honesty(msgspec.Struct, kw_only=True):
    """One dtype: all comparisons together, and by number of keys, class, output and family of inputs."""

    dtype: Dtype
    total: Usage
    by_keys: dict[int, Usages]
    by_class: dict[str, dict[int, Usages]]
    by_family: Usages

    @property
    def is_honest(self) -> bool:
        return self.total.false_fails == 0

    @property
    def slack(self) -> dict[str, list[int]]:
        """Numbers of keys at which an output errs, and in no class by a tenth of its probable bound."""
        return slack_lengths(self.by_keys)

    @property
    def slack_by_class(self) -> dict[str, dict[str, list[int]]]:
        """The same of each class alone; only what is slack."""
        found = {name: slack_lengths(by_keys) for name, by_keys in self.by_class.items()}
        return {name: {output: lengths for output, lengths in by.items() if lengths} for name, by in found.items()}


def slack_lengths(by_keys: dict[int, Usages]) -> dict[str, list[int]]:
    """By output, where its usage stays under SLACK; an output that is exact has no errors to be slack about."""
    return {
        output: [keys for keys, usages in by_keys.items() if 0 < usages[output].probable < SLACK] for output in OUTPUTS
    }


def ratio(error: Array, bound: Array) -> Array:
    """error / bound; 0 for an exact element and for one without a bound, inf where a bound of 0 is missed."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((error == 0) | np.isinf(bound), 0.0, np.where(np.isnan(error), np.inf, error / bound))


def compare_honest(dtype: Dtype, comparisons: int) -> Iterator[Honesty]:
    """Every class on every family at its lengths, and on until so many elements are compared.

    Gives the same record again after every block.
    """
    found, classes = no_comparisons(dtype), list(HONEST_CLASSES[dtype])
    plan = [(name, family, keys) for name in classes for keys in NUM_KEYS for family in families_for(keys)]
    for number in count():
        name, family, keys = plan[number % len(plan)]
        # over its families every class meets every feature at most lengths
        feature = FEATURES[number % len(FEATURES)]
        add_block(found, name, family, judge_block(dtype, name, family, feature, keys, SEED + number), keys)
        yield found
        if found.total.comparisons >= comparisons and number + 1 >= len(plan):
            return


def families_for(keys: int) -> tuple[str, ...]:
    """All of them, or a few where blocks are long."""
    return FAMILIES if keys <= 1024 else LONG_FAMILIES


def no_comparisons(dtype: Dtype) -> Honesty:
    """An empty record."""
    return Honesty(
        dtype=dtype,
        total=Usage(),
        by_keys=no_usages(),
        by_class={name: no_usages() for name in HONEST_CLASSES[dtype]},
        by_family={family: Usage() for family in FAMILIES},
    )


def no_usages() -> dict[int, Usages]:
    return {keys: {output: Usage() for output in OUTPUTS} for keys in NUM_KEYS}


def size_for(keys: int) -> Size:
    """Fewer and shorter rows where there are many keys: a bound has to hold for each, and time is finite."""
    return SHORT if keys <= 1024 else LONG if keys <= 16384 else LONGEST


def judge_block(dtype: Dtype, name: str, family: str, feature: str, keys: int, seed: int) -> list[Judged]:
    """One emulated kernel on one block."""
    honest, size = HONEST_CLASSES[dtype][name], size_for(keys)
    kv_dtype: Dtype = "float32" if honest.is_dequantized else dtype
    case = build_case(
        dtype, family, feature, keys=keys, rows=size.rows, head_dim=size.head_dim, seed=seed, kv_dtype=kv_dtype
    )
    return judge_honest(case, honest)


def add_block(found: Honesty, name: str, family: str, outputs: list[Judged], keys: int) -> None:
    """Counts one block's outputs wherever they belong."""
    for judged in outputs:
        places = (found.by_keys[keys], found.by_class[name][keys])
        for usage in (found.total, found.by_family[family], *(place[judged.output] for place in places)):
            usage.add(judged.error, judged.worst, judged.probable)
