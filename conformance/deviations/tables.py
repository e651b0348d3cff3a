"""The kill matrix for a terminal."""

from collections import Counter

from rich.console import Group
from rich.table import Table

from attnconform.conformance.deviations.judging import area
from attnconform.conformance.deviations.records import KillMatrix


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
    for column in ("policy", "used by", "designed cases", "long random ones", "false alarms", "on random ones"):
        table.add_column(column, justify="left" if column in ("policy", "used by") else "right")
    for policy in result.policies:
        counts = (policy.designed, policy.random)
        caught = [f"{count.caught} of {count.deviations}" for count in counts]
        alarms = [f"{count.false_alarms} of {count.variant_cases}" for count in counts]
        table.add_row(policy.name, policy.source, *caught, *alarms)
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
        elif d.escaped_seeds:
            table.add_row("survived other seeds", d.id, f"{d.clause}: {', '.join(map(str, d.escaped_seeds))}")
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
    seeds = f", under each of {result.seeds} seeds" if result.seeds > 1 else ""
    judged = sum(v.judged - v.unsupported for v in result.variants)
    return (
        f"{verdict}: {killed} of {len(result.deviations)} deviations killed by a check of their clause "
        f"({named_exactly} with the clause named), "
        f"{accepted} of {len(result.variants)} faithful variants accepted on {judged} cases{seeds}"
    )
