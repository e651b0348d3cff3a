"""Deviations before the judge until a check of their clause catches them; variants before it, to be accepted."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.clauses import CHECKS
from attnconform.conformance.deviations.deviation import Deviation, Variant
from attnconform.conformance.deviations.long_cases import long_cases
from attnconform.conformance.deviations.observation import observe, samples_of, shows
from attnconform.conformance.deviations.records import (
    DeviationScore,
    Kill,
    Outcome,
    PolicyCount,
    PolicyScore,
    Rejection,
    VariantScore,
)
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.trial import BackendCrash
from attnconform.conformance.judge.verdict import CONFORMING, CaseResult, Finding, State
from attnconform.conformance.policies import POLICIES

ENOUGH_JUDGED = 3  # cases after which a related kill will do, where none names the very clause
MAX_JUDGED = 12  # cases of a clause that a deviation is given to show itself
POLICY_CASES = 3  # cases of a deviation that policies are measured on
VARIANT_CASES = 60  # a variant sees at least so many, where there are
NOT_A_KILL: frozenset[State] = CONFORMING | {"UNSUPPORTED", "VACUOUS", "HARNESS_ERROR"}
WITH_NUMBERS = ("forward", "backward")  # operations whose outputs can be laid beside the reference's


def score_deviation(deviation: Deviation, cases: Sequence[Case]) -> DeviationScore:
    """Judges case after case until a finding names the deviation's clause, or a few where a related one has to do."""
    screen = Screen(deviation, cases)
    results: list[CaseResult] = []
    for group in screen.groups():
        judge_until_killed(deviation, group, results)
        if is_enough(results, deviation.clause):
            break
    kills = [kill for result in results for kill in kills_of(result, deviation.clause)]
    designed = screen.first_shown(POLICY_CASES)
    random = [case for case in long_cases() if shows(case, deviation.build())]
    return DeviationScore(
        id=deviation.id,
        clause=deviation.clause,
        idea=deviation.idea,
        report=deviation.report,
        fault_class=deviation.fault_class,
        outcome=outcome_of(kills),
        judged=len(results),
        kills=tuple(kills),
        harness_errors=tuple(harness_errors(deviation.id, results)),
        policy_cases={"designed": len(designed), "random": len(random)},
        rejected_by={
            name: policies_rejecting(deviation, seen) for name, seen in (("designed", designed), ("random", random))
        },
    )


def judge_until_killed(deviation: Deviation, cases: Iterator[Case], results: list[CaseResult]) -> None:
    """Adds verdicts to results, MAX_JUDGED at most; a case that the deviation's backend does not run is none."""
    limit = len(results) + MAX_JUDGED
    for case in cases:
        result = judge_case(case, deviation.build())
        if result.state != "UNSUPPORTED":
            results.append(result)
        if len(results) >= limit or is_enough(results, deviation.clause):
            return


def is_enough(results: Sequence[CaseResult], clause: str) -> bool:
    """Whether some finding names the clause, or a few cases were judged and a related finding has to do."""
    kills = [kill for result in results for kill in kills_of(result, clause)]
    return any(kill.is_named for kill in kills) or (is_killed(results, clause) and len(results) >= ENOUGH_JUDGED)


def is_killed(results: Sequence[CaseResult], clause: str) -> bool:
    """Whether some finding names the clause's area or comes from a check of the clause."""
    return outcome_of([kill for result in results for kill in kills_of(result, clause)]) == "killed"


def harness_errors(deviation_id: str, results: Sequence[CaseResult]) -> Iterator[str]:
    """Faults of the suite itself, a line each."""
    for result in results:
        for finding in result.findings:
            if finding.state == "HARNESS_ERROR":
                yield f"{deviation_id} on {result.case_id}: {finding.message}"


def outcome_of(kills: Sequence[Kill]) -> Outcome:
    """The best that the kills amount to."""
    if any(kill.is_related for kill in kills):
        return "killed"
    return "unrelated_only" if kills else "survived"


def kills_of(result: CaseResult, clause: str) -> Iterator[Kill]:
    """The failures among a case's findings."""
    for finding in result.findings:
        if finding.state in NOT_A_KILL:
            continue
        yield Kill(
            case_id=result.case_id,
            check=finding.check,
            state=finding.state,
            clauses=finding.clauses,
            message=finding.message,
            is_related=is_related(finding, clause),
            is_named=clause in finding.clauses,
        )


def is_related(finding: Finding, clause: str) -> bool:
    """Whether a finding names a clause of the same area, or comes from a check of this very clause.

    A crash says what it names and no more: it ends whichever check happens to run.
    """
    if any(area(named_clause) == area(clause) for named_clause in finding.clauses):
        return True
    return finding.state != "CRASH" and clause in checked_clauses(finding.check)


def area(clause: str) -> str:
    """SET of SET-DUPLICATE."""
    return clause.split("-")[0]


def checked_clauses(check: str) -> tuple[str, ...]:
    """The clauses that a check is registered for."""
    return next((ids for name, ids in CHECKS.items() if name.rpartition(".")[2] == check), ())


def policies_rejecting(deviation: Deviation, cases: Sequence[Case]) -> tuple[str, ...]:
    """Published policies that reject the deviation on at least one of the cases."""
    return tuple(sorted({name for case in cases for name in rejecting(case, deviation.build())}))


class Screen:
    """On which cases a deviation shows itself at all: one run beside the reference's, far cheaper than a verdict.

    What it leaves out is judged too, in the end: some mistakes need poison, or a second call, to show.
    """

    def __init__(self, deviation: Deviation, cases: Sequence[Case]) -> None:
        self.deviation = deviation
        ordered = sorted(cases, key=lambda case: hashlib.sha256(f"{deviation.id} {case.id}".encode()).digest())
        self.tagged = [case for case in ordered if is_tagged(case, deviation.clause)]
        with_numbers = [case for case in ordered if case.operation in WITH_NUMBERS]
        self.others = [case for case in with_numbers if not is_tagged(case, deviation.clause)]
        self.verdicts: dict[str, bool] = {}

    def groups(self) -> Iterator[Iterator[Case]]:
        """Cases of the clause on which it shows, cases of the clause on which it does not, others on which it does."""
        yield (case for case in self.tagged if self.shows(case))
        yield (case for case in self.tagged if not self.shows(case))
        yield (case for case in self.others if self.shows(case))

    def first_shown(self, count: int) -> list[Case]:
        """The first cases of the clause on which it shows in its numbers."""
        found: list[Case] = []
        for case in self.tagged:
            if len(found) < count and case.operation in WITH_NUMBERS and self.shows(case):
                found.append(case)
        return found

    def shows(self, case: Case) -> bool:
        """Whether one call differs in any bit from the reference's; any, where a case has no outputs to compare."""
        if case.id not in self.verdicts:
            self.verdicts[case.id] = case.operation not in WITH_NUMBERS or shows(case, self.deviation.build())
        return self.verdicts[case.id]


def is_tagged(case: Case, clause: str) -> bool:
    """Whether a case exercises a clause; a bound is exercised by every case that has its output."""
    if area(clause) == "BOUND":
        return case.operation == ("backward" if clause in ("BOUND-GRAD", "BOUND-VOID", "BOUND-RULE") else "forward")
    return clause in case.clauses


def score_variant(variant: Variant, cases: Sequence[Case]) -> VariantScore:
    """Judges a faithful variant on a sample of the matrix, and lays it before the published policies."""
    sample = sample_of(cases, variant.id)
    results = [judge_case(case, variant.build()) for case in sample]
    with_numbers = [
        c for c, r in zip(sample, results, strict=True) if r.state != "UNSUPPORTED" and c.operation in WITH_NUMBERS
    ]
    designed = with_numbers[:: max(len(with_numbers) // len(long_cases()), 1)][: len(long_cases())]
    return replace(
        variant_score(variant, results),
        policy_cases={"designed": len(designed), "random": len(long_cases())},
        rejected_by={"designed": count_alarms(variant, designed), "random": count_alarms(variant, long_cases())},
    )


def variant_score(variant: Variant, results: Sequence[CaseResult]) -> VariantScore:
    """What verdicts on a variant amount to."""
    rejected = [r for r in results if not r.is_conforming and r.state != "UNSUPPORTED"]
    return VariantScore(
        id=variant.id,
        idea=variant.idea,
        judged=len(results),
        unsupported=sum(r.state == "UNSUPPORTED" for r in results),
        quality=sum(r.state == "QUALITY" for r in results),
        rejections=tuple(
            Rejection(case_id=r.case_id, state=r.state, message=r.findings[0].message if r.findings else r.reason)
            for r in rejected
        ),
    )


def sample_of(cases: Sequence[Case], name: str, count: int = VARIANT_CASES) -> list[Case]:
    """Every n-th case, `count` or more; the first one differs by name, so that variants cover more together."""
    stride = max(len(cases) // count, 1)
    return list(cases[int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % stride :: stride])


def count_alarms(variant: Variant, cases: Sequence[Case]) -> dict[str, int]:
    """How many of the cases each published policy rejects."""
    return dict(Counter(name for case in cases for name in rejecting(case, variant.build())))


def score_policies(deviations: Sequence[DeviationScore], variants: Sequence[VariantScore]) -> tuple[PolicyScore, ...]:
    """What the published policies caught of the deviations that changed a bit somewhere."""
    return tuple(
        PolicyScore(
            name=policy.name,
            source=policy.source,
            designed=count_policy(policy.name, "designed", deviations, variants),
            random=count_policy(policy.name, "random", deviations, variants),
            missed=tuple(
                d.id for d in deviations if d.policy_cases["designed"] and policy.name not in d.rejected_by["designed"]
            ),
        )
        for policy in POLICIES
    )


def count_policy(
    name: str, kind: str, deviations: Sequence[DeviationScore], variants: Sequence[VariantScore]
) -> PolicyCount:
    """One policy on one kind of cases."""
    return PolicyCount(
        caught=sum(name in d.rejected_by[kind] for d in deviations),
        deviations=sum(d.policy_cases[kind] > 0 for d in deviations),
        false_alarms=sum(v.rejected_by[kind].get(name, 0) for v in variants),
        variant_cases=sum(v.policy_cases[kind] for v in variants),
    )


def rejecting(case: Case, backend: Backend) -> frozenset[str]:
    """Names of the policies that reject what a backend gives on a case; all of them where it raises."""
    try:
        samples = list(samples_of(case, observe(case, backend)))
    except BackendCrash:
        return frozenset(policy.name for policy in POLICIES)
    return frozenset(p.name for p in POLICIES if not all(p.accepts(sample) for sample in samples))
