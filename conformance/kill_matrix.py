"""The suite's own power: every deviation must be caught by a check of its clause, every faithful variant accepted."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import msgspec
import torch
from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case, named
from attnconform.conformance.clauses import CHECKS
from attnconform.conformance.deviations import DEVIATIONS, VARIANTS, Deviation, Variant
from attnconform.conformance.judge.hygiene import same_outputs
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.trial import (
    BackendCrash,
    Observed,
    ObservedGradients,
    Trial,
    replace_seed,
    same_bits,
)
from attnconform.conformance.judge.verdict import CONFORMING, CaseResult, Finding, State
from attnconform.conformance.policies import POLICIES, long_cases, rejecting

Outcome = Literal["killed", "unrelated_only", "survived"]
Progressing = Callable[[str, int, int], None]  # id of what is finished, how many are, of how many
Call = tuple[Observed, ObservedGradients | None]

ENOUGH_JUDGED = 3  # cases after which a related kill will do, where none names the very clause
MAX_JUDGED = 12  # cases of a clause that a deviation is given to show itself
POLICY_CASES = 3  # cases of a deviation that policies are measured on
VARIANT_CASES = 60  # a variant sees at least so many, where there are
NOT_A_KILL: frozenset[State] = CONFORMING | {"UNSUPPORTED", "UNRESOLVED", "VACUOUS", "HARNESS_ERROR"}
WORKER_CASES: list[Case] = []  # a worker process's own copy, so that cases travel once
REFERENCE_CALLS: dict[str, Call] = {}  # by case id, which names the content: one call serves all deviations


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
    policy_cases: int = 0
    rejected_by: dict[
        str, tuple[str, ...]
    ] = {}  # on "designed" cases, and on "random" long ones: policies that reject it


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
    policy_cases: int = 0
    rejected_by: dict[str, dict[str, int]] = {}  # likewise: policy -> cases it rejects


class PolicyScore(msgspec.Struct, frozen=True, kw_only=True):
    """A published policy on the same deviations and variants."""

    name: str
    source: str
    deviations: int  # that changed an output for it to look at
    caught_designed: int  # on cases of the matrix
    caught_random: int  # on standard normal numbers and long contexts
    variant_cases: int
    false_alarms_designed: int
    false_alarms_random: int
    missed_designed: tuple[str, ...]


class KillMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """Deviations against checks, variants against the judge, policies against both."""

    deviations: tuple[DeviationScore, ...]
    variants: tuple[VariantScore, ...]
    survivors: tuple[str, ...]
    unrelated_only: tuple[str, ...]  # caught, and by no check of their clause or its area
    rejected_variants: tuple[str, ...]
    harness_errors: tuple[str, ...]
    policies: tuple[PolicyScore, ...]

    @property
    def is_ok(self) -> bool:
        """Nothing survived, nothing was caught by accident, nothing faithful was rejected."""
        return not (self.survivors or self.unrelated_only or self.rejected_variants or self.harness_errors)


def run(
    deviations: Sequence[Deviation],
    variants: Sequence[Variant],
    cases: Sequence[Case],
    *,
    seeds: int = 1,
    processes: int = 1,
    progress: Progressing | None = None,
) -> KillMatrix:
    """Judges every deviation on cases of its clause until a check of the clause kills it, and every variant.

    With several seeds every case is judged under each. Raises ValueError without cases.
    """
    if not cases:
        raise ValueError("cases is empty: nothing can be caught")
    reseeded = [reseed(case, i) for i in range(seeds) for case in cases]
    entries: list[Deviation | Variant] = [*deviations, *variants]
    scores = score_all(entries, reseeded, processes, progress or (lambda *_: None))
    of_deviations = tuple(s for s in scores if isinstance(s, DeviationScore))
    of_variants = tuple(s for s in scores if isinstance(s, VariantScore))
    return KillMatrix(
        deviations=of_deviations,
        variants=of_variants,
        survivors=tuple(s.id for s in of_deviations if s.outcome == "survived"),
        unrelated_only=tuple(s.id for s in of_deviations if s.outcome == "unrelated_only"),
        rejected_variants=tuple(s.id for s in of_variants if s.rejections),
        harness_errors=tuple(error for s in of_deviations for error in s.harness_errors),
        policies=score_policies(of_deviations, of_variants),
    )


def reseed(case: Case, times: int) -> Case:
    """The case with another seed, and the id that belongs to it; itself for 0."""
    if not times:
        return case
    return named(replace_seed(case, case.seed + (times << 40)), case.id.split(".")[2])


def score_all(
    entries: Sequence[Deviation | Variant], cases: Sequence[Case], processes: int, progress: Progressing
) -> list[DeviationScore | VariantScore]:
    """Scores in the order of the entries."""
    scores: dict[int, DeviationScore | VariantScore] = {}
    if processes == 1:
        for i, entry in enumerate(entries):
            scores[i] = score(entry, cases)
            progress(entry.id, len(scores), len(entries))
        return list(scores.values())
    # spawned, not forked: torch's threads do not survive a fork
    pool = ProcessPoolExecutor(processes, get_context("spawn"), start_worker, (list(cases),))
    with pool:
        waiting = {pool.submit(score_in_worker, entry): i for i, entry in enumerate(entries)}
        for future in as_completed(waiting):
            i = waiting[future]
            scores[i] = future.result()
            progress(entries[i].id, len(scores), len(entries))
    return [scores[i] for i in range(len(entries))]


def start_worker(cases: list[Case]) -> None:
    """Prepares a worker process; one thread each, or they would take each other's cores."""
    torch.set_num_threads(1)
    WORKER_CASES[:] = cases


def score_in_worker(entry: Deviation | Variant) -> DeviationScore | VariantScore:
    return score(entry, WORKER_CASES)


def score(entry: Deviation | Variant, cases: Sequence[Case]) -> DeviationScore | VariantScore:
    """The score of a deviation or a variant."""
    return score_deviation(entry, cases) if isinstance(entry, Deviation) else score_variant(entry, cases)


def score_deviation(deviation: Deviation, cases: Sequence[Case]) -> DeviationScore:
    """Judges case after case until a finding names the deviation's clause, or a few where a related one has to do."""
    screen = Screen(deviation, cases)
    kills: list[Kill] = []
    errors: list[str] = []
    judged = 0
    for case in screen.worth_judging():
        result = judge_case(case, deviation.build())
        judged += 1
        kills += kills_of(result, deviation.clause)
        errors += [f"{deviation.id} on {case.id}: {f.message}" for f in result.findings if f.state == "HARNESS_ERROR"]
        if any(kill.is_named for kill in kills) or (outcome_of(kills) == "killed" and judged >= ENOUGH_JUDGED):
            break
    designed = screen.first_shown(POLICY_CASES)
    random = [case for case in long_cases() if shows(deviation.build(), case)]
    return DeviationScore(
        id=deviation.id,
        clause=deviation.clause,
        idea=deviation.idea,
        report=deviation.report,
        fault_class=deviation.fault_class,
        outcome=outcome_of(kills),
        judged=judged,
        kills=tuple(kills),
        harness_errors=tuple(errors),
        policy_cases=len(designed) + len(random),
        rejected_by={
            name: policies_rejecting(deviation, seen) for name, seen in (("designed", designed), ("random", random))
        },
    )


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
        self.others = [case for case in ordered if not is_tagged(case, deviation.clause)]
        self.verdicts: dict[str, bool] = {}

    def worth_judging(self) -> Iterator[Case]:
        """Cases of the clause on which it shows, cases of the clause on which it does not, others on which it does."""
        shown = 0
        for case in self.tagged:
            if shown < MAX_JUDGED and self.shows(case):
                shown += 1
                yield case
        yield from [case for case in self.tagged if not self.verdicts.get(case.id, False)][:MAX_JUDGED]
        for case in [case for case in self.others if self.shows(case)][:MAX_JUDGED]:
            yield case

    def first_shown(self, count: int) -> list[Case]:
        """The first cases of the clause on which it shows in its numbers."""
        found: list[Case] = []
        for case in self.tagged:
            if len(found) < count and case.operation != "refusal" and self.shows(case):
                found.append(case)
        return found

    def shows(self, case: Case) -> bool:
        """Whether one call differs in any bit from the reference's; a refusal case has nothing to compare."""
        if case.id not in self.verdicts:
            self.verdicts[case.id] = case.operation == "refusal" or shows(self.deviation.build(), case)
        return self.verdicts[case.id]


def is_tagged(case: Case, clause: str) -> bool:
    """Whether a case exercises a clause; a bound is exercised by every case that has its output."""
    if clause == "BOUND-GRAD":
        return case.operation == "backward"
    if area(clause) == "BOUND":
        return case.operation == "forward"
    return clause in case.clauses


def shows(backend: Backend, case: Case) -> bool:
    """Whether one call of a backend differs from the reference's."""
    try:
        observed, gradients = observe(case, backend)
    except BackendCrash:
        return True
    right, right_gradients = observe_reference(case)
    if observed.mutated or not observed.guards_intact or observed.path != right.path:
        return True
    if not same_outputs(observed, right):
        return True
    return gradients is not None and right_gradients is not None and not same_gradients(gradients, right_gradients)


def observe(case: Case, backend: Backend) -> Call:
    """The first call on a case, and its backward where the case has one."""
    trial = Trial(case, backend)
    is_backward = case.operation == "backward"
    return trial.base, trial.run_backward(trial.values, trial.base) if is_backward else None


def observe_reference(case: Case) -> Call:
    """The reference's own call."""
    if case.id not in REFERENCE_CALLS:
        REFERENCE_CALLS[case.id] = observe(case, StepsBackend())
    return REFERENCE_CALLS[case.id]


def same_gradients(a: ObservedGradients, b: ObservedGradients) -> bool:
    """Bitwise the same dq, dk, dv and dsink, and no input changed."""
    pairs = [(a.raw.dq, b.raw.dq), (a.raw.dk, b.raw.dk), (a.raw.dv, b.raw.dv)]
    if a.raw.dsink is not None and b.raw.dsink is not None:
        pairs.append((a.raw.dsink, b.raw.dsink))
    return not a.mutated and all(same_bits(x, y) for x, y in pairs)


def score_variant(variant: Variant, cases: Sequence[Case]) -> VariantScore:
    """Judges a faithful variant on a sample of the matrix."""
    sample = sample_of(cases, variant.id)
    results = [judge_case(case, variant.build()) for case in sample]
    rejected = [r for r in results if not r.is_conforming and r.state != "UNSUPPORTED"]
    with_numbers = [
        c for c, r in zip(sample, results, strict=True) if r.state != "UNSUPPORTED" and c.operation != "refusal"
    ]
    designed = with_numbers[:: max(len(with_numbers) // len(long_cases()), 1)][: len(long_cases())]
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
        policy_cases=len(designed),
        rejected_by={"designed": count_alarms(variant, designed), "random": count_alarms(variant, long_cases())},
    )


def sample_of(cases: Sequence[Case], name: str) -> list[Case]:
    """Every n-th case, VARIANT_CASES or more; the first one differs by name, so that variants cover more together."""
    stride = max(len(cases) // VARIANT_CASES, 1)
    return list(cases[int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % stride :: stride])


def count_alarms(variant: Variant, cases: Sequence[Case]) -> dict[str, int]:
    """How many of the cases each published policy rejects."""
    return dict(Counter(name for case in cases for name in rejecting(case, variant.build())))


def score_policies(deviations: Sequence[DeviationScore], variants: Sequence[VariantScore]) -> tuple[PolicyScore, ...]:
    """What the published policies caught of the deviations that changed some output."""
    shown = [d for d in deviations if d.policy_cases]
    return tuple(
        PolicyScore(
            name=policy.name,
            source=policy.source,
            deviations=len(shown),
            caught_designed=sum(policy.name in d.rejected_by["designed"] for d in shown),
            caught_random=sum(policy.name in d.rejected_by["random"] for d in shown),
            variant_cases=sum(v.policy_cases for v in variants),
            false_alarms_designed=sum(v.rejected_by["designed"].get(policy.name, 0) for v in variants),
            false_alarms_random=sum(v.rejected_by["random"].get(policy.name, 0) for v in variants),
            missed_designed=tuple(d.id for d in shown if policy.name not in d.rejected_by["designed"]),
        )
        for policy in POLICIES
    )


def render(result: KillMatrix) -> Group:
    """The matrix for a terminal: by area, by check, by policy, and everything that is wrong."""
    tables = [areas_table(result), checks_table(result), policies_table(result)]
    problems = problems_table(result)
    return Group(*tables, *([problems] if problems.row_count else []), summary(result))


def areas_table(result: KillMatrix) -> Table:
    """How many deviations of each area of the spec were caught."""
    table = Table(title="deviations by area of SPEC.md")
    for column in ("area", "deviations", "killed", "by unrelated checks only", "survived"):
        table.add_column(column, justify="left" if column == "area" else "right")
    for name in sorted({area(d.clause) for d in result.deviations}):
        outcomes = Counter(d.outcome for d in result.deviations if area(d.clause) == name)
        counts = (outcomes["killed"], outcomes["unrelated_only"], outcomes["survived"])
        table.add_row(name, str(sum(counts)), *(str(n or "") for n in counts))
    return table


def checks_table(result: KillMatrix) -> Table:
    """How many deviations each check caught, of those that were judged before they were caught."""
    table = Table(title="deviations by check")
    for column in ("check", "caught", "of its own clauses"):
        table.add_column(column, justify="left" if column == "check" else "right")
    kills = {(d.id, k.check, k.is_related) for d in result.deviations for k in d.kills}
    for check in sorted({check for _, check, _ in kills}):
        caught = {deviation for deviation, by, _ in kills if by == check}
        related = {deviation for deviation, by, is_own in kills if by == check and is_own}
        table.add_row(check, str(len(caught)), str(len(related)))
    return table


def policies_table(result: KillMatrix) -> Table:
    """What published policies caught of the same deviations, and what faithful variants they rejected."""
    table = Table(title="published policies on the same deviations")
    for column in ("policy", "used by", "designed numbers", "random numbers", "false alarms, designed", "random"):
        table.add_column(column, justify="left" if column in ("policy", "used by") else "right")
    for policy in result.policies:
        table.add_row(
            policy.name,
            policy.source,
            f"{policy.caught_designed} of {policy.deviations}",
            f"{policy.caught_random} of {policy.deviations}",
            f"{policy.false_alarms_designed} of {policy.variant_cases}",
            f"{policy.false_alarms_random} of {policy.variant_cases}",
        )
    return table


def problems_table(result: KillMatrix) -> Table:
    """Survivors, accidental catches, rejected variants and faults of the suite itself."""
    table = Table(title="wrong")
    for column in ("what", "which", "detail"):
        table.add_column(column)
    for d in result.deviations:
        if d.outcome == "survived":
            table.add_row("survived", d.id, f"{d.clause}: {d.idea} ({d.judged} cases judged)")
        elif d.outcome == "unrelated_only":
            seen = ", ".join(sorted({f"{k.check} {k.state}" for k in d.kills}))
            table.add_row("caught by unrelated checks only", d.id, f"{d.clause}: {seen}")
    for v in result.variants:
        for rejection in v.rejections[:1]:
            table.add_row(
                "faithful, and rejected", v.id, f"{rejection.case_id}: {rejection.state}: {rejection.message}"
            )
    for error in result.harness_errors:
        table.add_row("fault of the suite", "", error)
    return table


def summary(result: KillMatrix) -> str:
    """One line."""
    killed = sum(d.outcome == "killed" for d in result.deviations)
    named_exactly = sum(any(k.is_named for k in d.kills) for d in result.deviations)
    accepted = len(result.variants) - len(result.rejected_variants)
    verdict = "ok" if result.is_ok else "not ok"
    return (
        f"{verdict}: {killed} of {len(result.deviations)} deviations killed by a check of their clause "
        f"({named_exactly} with the clause named), "
        f"{accepted} of {len(result.variants)} faithful variants accepted"
    )


def kill_matrix_command(
    json_path: Path | None = None,
    *,
    level: str = "L1",
    select: str = "",
    seeds: int = 1,
    processes: int = 2,
    console: Console | None = None,
) -> int:
    """Runs the whole matrix, prints it, writes it as JSON; the exit code: 0 where all is as it must be, else 1.

    `select` keeps deviations and variants whose id or clause holds it. Raises ValueError where nothing is left.
    """
    console = console or Console()
    deviations = [d for d in DEVIATIONS.values() if select in d.id or select in d.clause]
    variants = [v for v in VARIANTS.values() if select in v.id]
    if not deviations and not variants:
        raise ValueError(f"select is {select!r}, and no deviation or variant has that in its id or clause")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("kill matrix", total=len(deviations) + len(variants))

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=name)

        result = run(deviations, variants, matrix(level), seeds=seeds, processes=processes, progress=show)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result, order="deterministic")))
    console.print(render(result))
    return 0 if result.is_ok else 1
