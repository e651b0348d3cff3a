"""What became of deviations, variants and policies: the records that the kill matrix is made of."""

from typing import Literal

import msgspec

from attnconform.conformance.judge.verdict import State

Outcome = Literal["killed", "unrelated_only", "survived"]


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """A check that rejected a deviation on a case."""

    case_id: str
    check: str
    state: State
    clauses: tuple[str, ...]  # what the finding names
    message: str
    is_related: bool  # the finding names the deviation's clause or its area, or comes from a check of the clause
    is_named: bool  # the finding names the very clause


class DeviationScore(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one deviation."""

    id: str
    clause: str
    idea: str
    report: str
    fault_class: str
    outcome: Outcome
    judged: int  # cases
    kills: tuple[Kill, ...]
    harness_errors: tuple[str, ...] = ()
    policy_cases: dict[str, int] = {}  # on "designed" cases of the matrix, and on "random" long ones: how many show it
    rejected_by: dict[str, tuple[str, ...]] = {}  # likewise: policies that reject it on one of them
    escaped_seeds: tuple[int, ...] = ()  # under which no check of its clause killed it


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A case on which the judge did not accept a faithful variant."""

    case_id: str
    state: State
    message: str


class VariantScore(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one faithful variant."""

    id: str
    idea: str
    judged: int
    unsupported: int
    quality: int  # cases within the worst-case bound and past the probable one
    rejections: tuple[Rejection, ...]
    policy_cases: dict[str, int] = {}
    rejected_by: dict[str, dict[str, int]] = {}  # likewise: policy -> cases it rejects


class PolicyCount(msgspec.Struct, frozen=True, kw_only=True):
    """How a policy did on one kind of cases."""

    caught: int
    deviations: int  # that show themselves on some case
    false_alarms: int
    variant_cases: int


class PolicyScore(msgspec.Struct, frozen=True, kw_only=True):
    """A published policy on the same deviations and variants."""

    name: str
    source: str
    designed: PolicyCount  # on cases of the matrix
    random: PolicyCount  # on standard normal numbers and long contexts
    missed: tuple[str, ...]  # deviations that it accepts on all designed cases that show them


class KillMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """Deviations against checks, variants against the judge, policies against both."""

    deviations: tuple[DeviationScore, ...]
    variants: tuple[VariantScore, ...]
    survivors: tuple[str, ...]
    unrelated_only: tuple[str, ...]  # caught, and by no check of their clause or its area
    rejected_variants: tuple[str, ...]
    harness_errors: tuple[str, ...]
    policies: tuple[PolicyScore, ...]
    seeds: int = 1  # under which every deviation was judged; a variant sees another sample under each
    escaped: tuple[str, ...] = ()  # killed under the cases' own seed, and not under every other

    @property
    def is_ok(self) -> bool:
        """Nothing survived under any seed, nothing was caught by accident, nothing faithful was rejected."""
        missed = self.survivors or self.unrelated_only or self.escaped
        return not (missed or self.rejected_variants or self.harness_errors)
