"""Why does a backend fail a case? Shrink it, walk the stages, and name the clause whose breach gives these numbers."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import Backend, Capabilities
from attnconform.conformance.bundles import RESULTS
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case, decode_case, encode_case, is_own
from attnconform.conformance.deviations import Deviation
from attnconform.conformance.explain.answer import Make
from attnconform.conformance.explain.discriminate import tell_apart
from attnconform.conformance.explain.rank import Match, rank_deviations
from attnconform.conformance.explain.reproducer import write_reproducer
from attnconform.conformance.explain.shrink import shrink
from attnconform.conformance.explain.signature import Signature, signature_of
from attnconform.conformance.explain.stages import Stage, first_wrong_stage
from attnconform.conformance.explain.telling import Untold
from attnconform.conformance.isolation import is_device_fault, is_spoilt
from attnconform.conformance.judge import judge
from attnconform.conformance.judge.trial import BackendCrash, Trial
from attnconform.conformance.judge.verdict import CaseResult, Finding
from attnconform.conformance.report.text import finding_text
from attnconform.conformance.results import ResultLine
from attnconform.conformance.selection import case_by_id, own_cases

NAMED = 3  # deviations that are printed
WITH_NUMBERS = ("forward", "backward")
# states that say something of a call, and nothing of where its numbers first go wrong
OF_THE_CALL = frozenset({
    "CRASH", "HANG", "OOM", "FAIL_oob_write", "FAIL_input_mutated", "FALLBACK_UNDECLARED", "FAIL_unwritten",
    "FAIL_race", "FAIL_determinism", "FAIL_leak",
})  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """What can be said of a failed case."""

    result: CaseResult  # of the case as given
    small: Case  # the smallest that fails in the same way
    stage: Stage | None  # of the smallest case
    where: str  # what the wrong elements of the case as given have in common, in kernel terms
    signature: Signature | None
    matches: list[Match]  # the likeliest first


def explain(
    case: Case,
    make: Make,
    result: CaseResult,
    *,
    deviations: Iterable[Deviation] | None = None,
    cases: Sequence[Case] | None = None,  # that tell deviations apart; those of the matrix by default
) -> Explanation:
    """The whole explanation of a case that a backend fails; `make` gives a fresh backend at every call."""
    cases = matrix("L1") if cases is None else cases
    small = minimal_case(case, make, result)
    check = result.findings[0].check
    with np.errstate(all="ignore"):  # deviations overflow and divide by 0 on purpose
        matches = rank_deviations(small, make, deviations, check=check)
        matches = tell_apart(matches, make, case, cases, check=check)
        has_numbers = case.operation in WITH_NUMBERS
        stage = stage_or_none(small, make, result) if has_numbers else None
        where = where_of(case, make, result) if has_numbers else ""
        signature = signature_or_none(case, make, result) if has_numbers else None
    return Explanation(result, small, stage, where, signature, matches)


def minimal_case(case: Case, make: Make, result: CaseResult) -> Case:
    """The smallest case that the same check fails in the same way."""
    first = result.findings[0]
    check = next((c for c in judge.CHECKS_OF[case.operation] if c.__name__ == first.check), None)
    if check is None or case.operation not in WITH_NUMBERS:
        return case

    def still_fails(smaller: Case) -> bool:
        return any(is_alike(first, f) for f in judge.judge_case(smaller, make(), checks=[check]).findings)

    return shrink(case, still_fails)


def is_alike(a: Finding, b: Finding) -> bool:
    """Whether two findings say the same of two cases: the same state, and the same error where one was raised."""
    return a.state == b.state and (a.state != "CRASH" or digits_out(a.message) == digits_out(b.message))


def digits_out(message: str) -> str:
    """A message without its numbers."""
    return re.sub(r"-?\d[\d.e+-]*", "#", message)


def where_of(case: Case, make: Make, result: CaseResult) -> str:
    """What the wrong elements have in common; on the case as given, where there are many of them."""
    stage = stage_or_none(case, make, result)
    return "" if stage is None else stage.where


def stage_or_none(case: Case, make: Make, result: CaseResult) -> Stage | None:
    """The first stage that differs: the call itself, where it raises or does more than answer, else one of numbers."""
    first = result.findings[0]
    if first.state in OF_THE_CALL:
        return Stage("call", first.message, "")
    try:
        found = first_wrong_stage(Trial(case, make()))
    except BackendCrash as crash:
        return Stage("call", str(crash), "")
    return found or Stage(f"none of the case's own call, but {first.check}", first.message, "")


def signature_or_none(case: Case, make: Make, result: CaseResult) -> Signature | None:
    """The kind of fault; none where it is no matter of numbers."""
    if result.findings[0].state in OF_THE_CALL:
        return None
    try:
        return signature_of(case, make, result)
    except BackendCrash:
        return None


# -- on the terminal ---------------------------------------------------------------------------------------------------


def load_case(name: str, capabilities: Capabilities | None = None) -> Case:
    """A case by id, of a run as FOLDER/CASE_ID, or from a JSON file: a case, or a line of results.

    An id of a backend's own domain needs its declaration. Raises ValueError where it is none of these.
    """
    path = Path(name)
    results = path.parent / RESULTS
    if path.suffix == ".json" or path.exists():
        return decode_line_or_case(read_bytes(path), name)
    if "/" in name and results.exists():
        lines = (line for line in read_bytes(results).splitlines() if path.name.encode() in line)
        found = (decode_line_or_case(line, str(results)) for line in lines)
        case = next((case for case in found if case.id == path.name), None)
        if case is None:
            raise ValueError(f"{results} has no case {path.name}")
        return case
    return case_by_id(name, capabilities=capabilities)


def read_bytes(path: Path) -> bytes:
    """A file's content. Raises ValueError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def decode_line_or_case(data: bytes, source: str) -> Case:
    """The case of a line of results, or a case alone. Raises ValueError as decode_case does."""
    try:
        line = msgspec.json.decode(data, type=ResultLine)
    except msgspec.DecodeError:
        return decode_case(data, source)
    return decode_case(encode_case(line.case), source)


def explain_case(console: Console, name: str, *, backend: str, device: str) -> int:
    """Prints the explanation; 0 where the case conforms after all, 1 where it does not."""
    make = partial(load_backend, backend, device)
    subject = make()
    case = load_case(name, subject.capabilities)
    result = judge.judge_case(case, subject)
    if result.is_conforming or result.state == "UNSUPPORTED":
        console.print(f"{case.id}: {result.state} {result.reason}", highlight=False)
        return 0
    for finding in result.findings:
        say(console, finding_text(finding))
    explanation = None if is_spoilt(result) else explain_while_answered(case, make, result, subject.capabilities)
    if explanation is None:  # whatever is called next fails likewise, and would look like a smaller failing case
        say(console, f"the device answers no other call of this process: {case.id} is neither shrunk nor compared")
        write_files(console, case, subject, backend, device)
        return 1
    print_explanation(console, explanation)
    if case.operation != "structure":
        write_files(console, explanation.small, make(), backend, device)
    return 1


def explain_while_answered(
    case: Case, make: Make, result: CaseResult, capabilities: Capabilities
) -> Explanation | None:
    """As explain; None where a call on the way, of a smaller case say, costs this process its device."""
    cases = (*matrix("L1"), *own_cases("L1", "", capabilities)) if is_own(case.id) else None
    try:
        return explain(case, make, result, cases=cases)
    except Exception as error:
        if is_device_fault(error) or is_device_fault(error.__cause__):
            return None
        raise


def say(console: Console, text: str) -> None:
    """One line, as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_explanation(console: Console, explanation: Explanation) -> None:
    """The smallest case, the stage, the place, the kind of fault, and the clause."""
    if explanation.small.operation in WITH_NUMBERS:
        say(console, f"smallest failing case: {describe(explanation.small)}")
    stage = explanation.stage
    if stage is not None:
        say(console, f"first wrong stage: {stage.name}: {stage.message}")
    if explanation.where:
        say(console, f"where, on the case as given: {explanation.where}")
    if explanation.signature is not None:
        say(console, f"kind of fault: {explanation.signature}")
    print_matches(console, explanation.matches)


def describe(case: Case) -> str:
    """A case's sizes in one line."""
    s = case.structure
    lists = "dense" if s.candidates is None else f"{s.candidates.granularity} lists {list(s.candidates.lists)[:4]}"
    return (
        f"{len(s.seqlens_q)} request(s), seqlens_q {s.seqlens_q}, seqlens_kv {s.seqlens_kv}, heads "
        f"{s.num_qo_heads}/{s.num_kv_heads}, page_size {s.page_size}, {lists}, mask {s.mask_rule}, values {case.values}"
    )


def print_matches(console: Console, matches: list[Match]) -> None:
    """The deviations that reproduce the numbers, or the nearest misses."""
    found = [m for m in matches if m.reproduces]
    if not found:
        say(console, "no known deviation reproduces these numbers")
        near = [m for m in matches if np.isfinite(m.distance)]
        for match in sorted(near, key=lambda m: m.distance)[:1]:
            text = f"nearest: {match.deviation.clause} broken as in {match.deviation.id}"
            say(console, f"{text}, {match.distance:.3g} bounds away ({match.deviation.idea})")
    for match in [m for m in found if m.order == found[0].order][:NAMED] or found[:1]:
        broken = f"your output equals the reference with {match.deviation.clause} broken"
        cases = f", on {match.agreed_cases} cases" if match.agreed_cases > 1 else ""
        say(console, f"{broken}: {match.deviation.id} ({match.deviation.idea}){cases}")


def write_files(console: Console, case: Case, subject: Backend, backend: str, device: str) -> None:
    """The minimal case as JSON, and the script that reproduces it."""
    case_file, script = Path(f"{case.id}.json"), Path(f"reproduce_{case.id}.py")
    case_file.write_bytes(encode_case(case))
    again = f"judge it again: attnconform explain {case_file} -b {backend}"
    try:
        write_reproducer(script, case, subject, backend=backend, device=device)
    except Untold as untold:
        say(console, f"wrote {case_file}, and no script: {untold}; {again}")
        return
    say(console, f"wrote {case_file} and {script}; {again}")
