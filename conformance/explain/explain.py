"""Why does a backend fail a case? Shrink it, walk the stages, and name the clause whose breach gives these numbers."""

from pathlib import Path

import numpy as np
from rich.console import Console

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.structure import Case, decode_case, encode_case
from attnconform.conformance.explain.rank import Match, rank_deviations
from attnconform.conformance.explain.reproducer import write_reproducer
from attnconform.conformance.explain.shrink import shrink
from attnconform.conformance.explain.stages import first_wrong_stage
from attnconform.conformance.judge import judge
from attnconform.conformance.judge.trial import BackendCrash, Trial
from attnconform.conformance.judge.verdict import CaseResult
from attnconform.conformance.report.text import finding_text
from attnconform.conformance.selection import case_by_id
from attnconform.reference.coordinates import FloatArray

NAMED = 3  # deviations that are printed


def load_case(name: str) -> Case:
    """A case by id, or from a JSON file. Raises ValueError where it is neither."""
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        try:
            return decode_case(path.read_bytes(), name)
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror}") from None
    return case_by_id(name)


def explain_case(console: Console, name: str, *, backend: str, device: str) -> int:
    """Prints the explanation; 0 where the case conforms after all, 1 where it does not."""
    case, subject = load_case(name), load_backend(backend, device)
    result = judge.judge_case(case, subject)
    if result.is_conforming or result.state == "UNSUPPORTED":
        console.print(f"{case.id}: {result.state} {result.reason}", highlight=False)
        return 0
    for finding in result.findings:
        console.print(finding_text(finding), highlight=False, markup=False)
    if case.operation in ("refusal", "structure"):
        return 1
    small = minimal_case(case, subject, result)
    console.print(f"smallest failing case: {describe(small)}", highlight=False)
    print_stage(console, small, subject)
    print_matches(console, rank_or_none(small, subject))
    write_files(console, small, backend, device)
    return 1


def minimal_case(case: Case, backend: Backend, result: CaseResult) -> Case:
    """The smallest case that the same check fails in the same way."""
    first = result.findings[0]
    check = next((c for c in judge.CHECKS_OF[case.operation] if c.__name__ == first.check), None)
    if check is None:
        return case

    def still_fails(smaller: Case) -> bool:
        return judge.judge_case(smaller, backend, checks=[check]).state == first.state

    return shrink(case, still_fails)


def describe(case: Case) -> str:
    """A case's sizes in one line."""
    s = case.structure
    lists = "dense" if s.candidates is None else f"{s.candidates.granularity} lists {list(s.candidates.lists)[:4]}"
    return (
        f"{len(s.seqlens_q)} request(s), seqlens_q {s.seqlens_q}, seqlens_kv {s.seqlens_kv}, heads "
        f"{s.num_qo_heads}/{s.num_kv_heads}, page_size {s.page_size}, {lists}, mask {s.mask_rule}, values {case.values}"
    )


def print_stage(console: Console, case: Case, backend: Backend) -> None:
    """The first stage that differs, and where in kernel terms."""
    try:
        stage = first_wrong_stage(Trial(case, backend))
    except BackendCrash as crash:
        console.print(f"stage: call: {crash}", highlight=False, markup=False)
        return
    if stage is not None:
        console.print(f"first wrong stage: {stage.name}: {stage.message}", highlight=False, markup=False)
        if stage.where:
            console.print(f"where: {stage.where}", highlight=False, markup=False)


def rank_or_none(case: Case, backend: Backend) -> list[Match]:
    """Deviations by distance; none where the backend gives no numbers."""
    try:
        return rank_deviations(case, backend)
    except BackendCrash:
        return []


def print_matches(console: Console, matches: list[Match]) -> None:
    """The deviations that reproduce the numbers, or the nearest misses."""
    found = [m for m in matches if m.reproduces]
    if not found:
        console.print("no known deviation reproduces these numbers")
    for match in found[:NAMED]:
        broken = f"your output equals the reference with {match.deviation.clause} broken"
        console.print(f"{broken}: {match.deviation.id} ({match.deviation.idea})", highlight=False, markup=False)


def write_files(console: Console, case: Case, backend: str, device: str) -> None:
    """The minimal case as JSON, and the script that reproduces it."""
    result = Trial(case, load_backend("reference", "cpu")).oracle
    want = {name: as_hex(getattr(result, name)) for name in ("out", "lse")}
    case_file, script = Path(f"{case.id}.json"), Path(f"reproduce_{case.id}.py")
    case_file.write_bytes(encode_case(case))
    write_reproducer(script, case, want, backend=backend, device=device)
    console.print(f"wrote {case_file} and {script}; judge it again: attnconform explain {case_file} -b {backend}")


def as_hex(array: FloatArray) -> dict[str, object]:
    """An array as its shape and hexadecimal floats."""
    return {"shape": list(array.shape), "data": [float(x).hex() for x in np.ravel(array)]}
