"""The short forms of a run: a badge, and Markdown for a CI's step summary."""

import json

from attnconform.conformance.judge.verdict import NOT_RUN
from attnconform.conformance.report.html import largest_usage
from attnconform.conformance.report.text import finding_text, repro_command
from attnconform.conformance.results import Run, verdict_of

COLOURS = {0: "brightgreen", 1: "red"}
MAX_FAILURES = 50


def badge(run: Run) -> str:
    """The JSON of a shields.io endpoint: verdict, level, and the declared share beside it."""
    verdict = verdict_of(run.results)
    message = f"{verdict.words.lower()}, {verdict.declared_share:.0%} declared"
    colour = COLOURS.get(verdict.exit_code, "lightgrey")
    content = {"schemaVersion": 1, "label": f"attnconform {run.header.level}", "message": message, "color": colour}
    return json.dumps(content) + "\n"


def usage_lines(run: Run) -> list[str]:
    """How much of its bound each output used at most, and the states of all cases."""
    usage = largest_usage(run)
    states = ", ".join(f"{state} {count}" for state, count in sorted(run.footer.counts.items()))
    table = [f"| {name} | {worst:.3f} | {probable:.3f} |" for name, (worst, probable) in usage.items()]
    head = ["| largest error / bound | worst-case form | probabilistic form |", "|---|---|---|"]
    return [states, "", *head, *table, ""] if table else [states, ""]


def summary_markdown(run: Run) -> str:
    """Verdict and failures, each with the command that reproduces it."""
    header, verdict = run.header, verdict_of(run.results)
    lines = [
        f"## attnconform {header.level}: {header.backend} is {verdict.words.lower()}",
        "",
        f"{verdict.conforming} of {verdict.ran} cases conform; {verdict.declared_share:.0%} of the matrix is declared "
        f"({verdict.unsupported} cases unsupported). {header.device}, suite {header.suite_hash}, {header.started}.",
        "",
        ", ".join(f"{name} {version}" for name, version in header.versions.items()),
        "",
        *usage_lines(run),
    ]
    failing = [r for r in run.results if not r.is_conforming and r.state not in NOT_RUN]
    for result in failing[:MAX_FAILURES]:
        first = finding_text(result.findings[0]) if result.findings else ""
        lines.append(
            f"- **{result.state}** `{result.case_id}` {first} `{repro_command(result.case_id, header.backend)}`"
        )
    if len(failing) > MAX_FAILURES:
        lines.append(f"- ... and {len(failing) - MAX_FAILURES} more, in results.jsonl")
    return "\n".join(lines) + "\n"
