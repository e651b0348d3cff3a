"""`expectations.toml`: failures that are known, each with a reason, a tracker and a day on which it must be looked at.

    [[expect]]
    case = "L1.forward.prefill-*"        # an id, or a glob over ids
    state = "FAIL_value"
    reason = "the soft cap is computed in bfloat16"
    tracker = "https://github.com/owner/project/issues/17"
    backend = "triton*"                  # glob over the name given to -b; every backend where it is left out
    device = "cuda*"                     # likewise
    expires = 2027-01-31                 # the last day on which it is expected

A file that has outlived its truth is an error, never a comment: an entry that no case answers to, one that has expired,
two that claim one case, and a case that conforms where a failure is expected.
"""

import tomllib
from collections.abc import Iterable, Mapping
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import msgspec

from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.verdict import CONFORMING, NOT_RUN, CaseResult, ExpectedFailure, State

UNEXPECTABLE: frozenset[State] = CONFORMING | NOT_RUN | {"HARNESS_ERROR"}  # HARNESS_ERROR is a fault of the suite


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file."""

    case: str
    state: str
    reason: str
    tracker: str
    expires: date
    backend: str = "*"
    device: str = "*"

    def is_of(self, backend: str, device: str) -> bool:
        """Whether a run with this backend on this device is in the entry's scope."""
        return fnmatchcase(backend, self.backend) and fnmatchcase(device, self.device)

    def claims(self, case_id: str) -> bool:
        """Whether the entry is of this case."""
        return case_id == self.case or fnmatchcase(case_id, self.case)


class ExpectationsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's content."""

    expect: tuple[Expectation, ...]


def load_expectations(
    path: Path, *, level: str, backend: str, device: str, own: Iterable[Case] = (), today: date | None = None
) -> dict[str, ExpectedFailure]:
    """What is expected of the cases of a level, and of those of the backend's own domain, by id.

    Cases are those of the whole level, so that a selection or a shard makes no entry stale. Raises ValueError, in one
    line, where the file cannot be read, is not of this form, or no longer fits the suite.
    """
    entries = read_entries(path)
    for number, entry in enumerate(entries, start=1):
        check_entry(entry, f"{path}: entry {number} ({entry.case})", today or date.today())
    in_scope = [(i, e) for i, e in enumerate(entries, start=1) if e.is_of(backend, device)]
    return claimed_cases(path, in_scope, [case.id for case in (*matrix(level), *own)], level)


def read_entries(path: Path) -> tuple[Expectation, ...]:
    """The file's entries in order."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(data, ExpectationsFile).expect
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} is no expectations file: {' '.join(str(error).split())}") from None


def check_entry(entry: Expectation, place: str, today: date) -> None:
    """Raises ValueError for an entry that says nothing, or says it no longer."""
    for name in ("case", "reason", "tracker", "backend", "device"):
        if not getattr(entry, name).strip():
            raise ValueError(f"{place}: {name} is empty")
    if entry.state not in get_args(State):
        raise ValueError(f"{place}: state is {entry.state!r}, which no case can have")
    if entry.state in UNEXPECTABLE:
        raise ValueError(f"{place}: state is {entry.state}, which is no failure of a backend")
    if entry.expires < today:
        raise ValueError(f"{place}: expired on {entry.expires}; see {entry.tracker}")


def claimed_cases(
    path: Path, entries: Iterable[tuple[int, Expectation]], case_ids: Iterable[str], level: str
) -> dict[str, ExpectedFailure]:
    """Expectations by case. Raises ValueError where an entry claims no case, or two claim one."""
    ids = list(case_ids)
    claimed: dict[str, ExpectedFailure] = {}
    by: dict[str, int] = {}
    for number, entry in entries:
        matched = [case_id for case_id in ids if entry.claims(case_id)]
        if not matched:
            raise ValueError(f"{path}: entry {number} ({entry.case}) matches no case of {level}")
        for case_id in matched:
            if case_id in by:
                raise ValueError(f"{path}: entries {by[case_id]} and {number} both claim {case_id}")
            by[case_id] = number
            claimed[case_id] = msgspec.convert(msgspec.structs.asdict(entry), ExpectedFailure)
    return claimed


def with_expectation(result: CaseResult, expected: Mapping[str, ExpectedFailure]) -> CaseResult:
    """The result with what was expected of its case; without it where nothing is."""
    return msgspec.structs.replace(result, expected=expected.get(result.case_id))
