"""What a cached plan and a cached mask are keyed on, and how often each was found."""

from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

from attnconform.reference.rules import MaskRule, ScoreRule


@dataclass(frozen=True, kw_only=True)
class CallDescription:
    """One call, as far as a cache may look at it. [PLAN-KEY, PLAN-VALUES, PLAN-MASK-KEY]"""

    architecture: str  # such as sm_90
    backend: str  # what makes the code: a compiler, a library, one of its kernels
    device: str  # such as cuda:0
    dtype: str
    head_dim_qk: int
    head_dim_vo: int
    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    layout: str  # NHD or HND
    q_block_size: int
    kv_block_size: int
    tier: int  # capacity that the plan was made for, in candidates a list
    mask_rule: MaskRule | None = None
    score_rules: tuple[ScoreRule, ...] = ()
    features: frozenset[str] = (
        frozenset()
    )  # what else is code: formats of K and V, RoPE, dropout, steps after the merge
    seqlens_q: tuple[int, ...]
    seqlens_kv: tuple[int, ...]
    q_offset: tuple[int, ...]
    is_one_mask_for_requests: bool = False  # one block mask, broadcast over the batch
    is_one_mask_for_heads: bool = True  # likewise, over query heads
    mask_version: int = 0  # of the tensors that a mask rule captures
    score_version: int = 0  # of the tensors that score rules capture
    candidates_version: int = 0

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads


# what code is generated for: a plan found under a key without one of these runs a kernel that does not fit
CODE_FIELDS = (
    "architecture", "backend", "dtype", "head_dim_qk", "head_dim_vo", "group_size", "page_size", "layout",
    "q_block_size", "kv_block_size", "tier", "features",
)  # fmt: skip
# what a block mask is built from, beside the rule
MASK_FIELDS = (
    "device", "backend", "q_block_size", "kv_block_size", "seqlens_q", "seqlens_kv", "q_offset",
    "is_one_mask_for_requests", "is_one_mask_for_heads", "mask_rule", "mask_version",
)  # fmt: skip


def plan_key(call: CallDescription) -> Hashable:
    """Equal for two calls exactly where one's compiled plan serves the other. [PLAN-KEY, PLAN-VALUES]

    Of the rules only their code counts: numbers in them are loaded when the kernel runs, like lengths and candidates
    inside the tier.
    """
    rules = (rule_code(call.mask_rule), *map(rule_code, call.score_rules))
    return (*(getattr(call, name) for name in CODE_FIELDS), rules)


def mask_key(call: CallDescription) -> Hashable:
    """Equal for two calls exactly where one's block mask serves the other. [PLAN-MASK-KEY]

    The whole mask rule counts, numbers included, and no score rule.
    """
    return tuple(getattr(call, name) for name in MASK_FIELDS)


def rule_code(value: object) -> Hashable:
    """A rule without its numbers: types, names, whether a limit is there at all, and nested rules. [PLAN-VALUES]

    A list of numbers is one captured tensor, whose length is a shape and no code.

    >>> from attnconform.reference.rules import And, Causal, Document, SoftCap, Window
    >>> rule_code(SoftCap(20.0)) == rule_code(SoftCap(30.0)), rule_code(Window(left=3)) == rule_code(Window(right=3))
    (True, False)
    >>> rule_code(And((Causal(), Document(((0, 5),))))) == rule_code(And((Causal(), Document(((0, 2, 7),)))))
    True
    """
    match value:
        case msgspec.Struct():
            return type(value).__name__, *(rule_code(getattr(value, name)) for name in value.__struct_fields__)
        case tuple() if any(isinstance(part, msgspec.Struct) for part in value):
            return tuple(rule_code(part) for part in value)
        case tuple():
            return "tensor"
        case str():
            return "name", value
        case None:
            return "absent"
        case _:
            return "number"


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """How often each of the two caches had what was looked for. [PLAN-COUNT]"""

    plan_hits: int = 0
    plan_misses: int = 0
    mask_hits: int = 0
    mask_misses: int = 0


class PlanCache:
    """Keys seen so far; what lies under a key is the owner's."""

    def __init__(self) -> None:
        self.plans: set[Hashable] = set()
        self.masks: set[Hashable] = set()
        self.counts = CacheCounts()

    def look_up(self, call: CallDescription) -> None:
        """Counts a hit or a miss in each cache by its own key, and keeps the keys. [PLAN-COUNT]"""
        plan, mask, before = plan_key(call), mask_key(call), self.counts
        has_plan, has_mask = plan in self.plans, mask in self.masks
        self.counts = CacheCounts(
            plan_hits=before.plan_hits + has_plan,
            plan_misses=before.plan_misses + (not has_plan),
            mask_hits=before.mask_hits + has_mask,
            mask_misses=before.mask_misses + (not has_mask),
        )
        self.plans.add(plan)
        self.masks.add(mask)
