"""The short forms of a run: a badge, and Markdown for a CI's step summary."""

import json

from attnconform.conformance.judge.ratio import ratio_text
from attnconform.conformance.report.html import largest_usage
from attnconform.conformance.report.text import expected_text, finding_text, repro_command, state_text
from attnconform.conformance.results import Run, verdict_of

COLOURS = {"CONFORMING": "brightgreen", "NOT CONFORMING": "red", "NOT CONFORMING, AS EXPECTED": "yellow"}
MAX_FAILURES = 50


def badge(run: Run) -> str:
    """The JSON of a shields.io endpoint: verdict, level, and the declared share beside it."""
    verdict = verdict_of(run.results)
    message = f"{verdict.words.lower()}, {verdict.declared_share:.0%} declared"
    colour = COLOURS.get(verdict.words, "lightgrey")
    content = {"schemaVersion": 1, "label": f"attnconform {run.header.level}", "message": message, "color": colour}
    return json.dumps(content) + "\n"


def usage_lines(run: Run) -> list[str]:
    """How much of its bound each output used at most, and the states of all cases."""
    usage = largest_usage(run.results)
    states = ", ".join(f"{state} {count}" for state, count in sorted(run.footer.counts.items()))
    table = [f"| {name} | {ratio_text(worst)} | {ratio_text(probable)} |" for name, (worst, probable) in usage.items()]
    head = ["| largest error / bound | worst-case form | probabilistic form |", "|---|---|---|"]
    return [states, "", *head, *table, ""] if table else [states, ""]


def summary_markdown(run: Run) -> str:
    """Verdict and failures, each with the command that reproduces it."""
    header, verdict = run.header, verdict_of(run.results)
    apart = f", {verdict.expected} fail as expected" if verdict.expected else ""
    lines = [
        f"## attnconform {header.level}: {header.backend} is {verdict.words.lower()}",
        "",
        f"{verdict.conforming} of {verdict.ran} cases conform{apart}; declared: {verdict.declared_text}. "
        f"{header.device}, suite {header.suite_hash}, {header.started}.",
        "",
        ", ".join(f"{name} {version}" for name, version in header.versions.items()),
        "",
        *usage_lines(run),
    ]
    failing = [r for r in run.results if r.is_failing]
    for result in failing[:MAX_FAILURES]:
        first = finding_text(result.findings[0]) if result.findings else ""
        lines.append(
            f"- **{state_text(result)}** `{result.case_id}` {first} `{repro_command(result.case_id, header.backend)}`"
        )
    if len(failing) > MAX_FAILURES:
        lines.append(f"- ... and {len(failing) - MAX_FAILURES} more, in results.jsonl")
    return "\n".join([*lines, *expected_lines(run)]) + "\n"


def expected_lines(run: Run) -> list[str]:
    """Failures that the run's expectations name, apart from the others."""
    expected = [expected_text(r) for r in run.results if r.is_expected_failure]
    if not expected:
        return []
    more = [f"- ... and {len(expected) - MAX_FAILURES} more, in results.jsonl"] if len(expected) > MAX_FAILURES else []
    return ["", f"### Expected failures ({len(expected)})", "", *(f"- {x}" for x in expected[:MAX_FAILURES]), *more]
