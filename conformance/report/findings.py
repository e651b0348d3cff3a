"""Faults that were found in released packages, and those that were known before the suite looked for them."""

import tomllib
from importlib import resources
from pathlib import Path

import msgspec

from attnconform.conformance.clauses import CLAUSES

BUNDLED = Path(str(resources.files("attnconform"))) / "fixtures" / "findings" / "findings.toml"
KNOWN_FAULTS = "known_faults.json"


class KnownFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What reading or trying a package had shown before."""

    id: str
    package: str
    observation: str
    source: str  # "run", "read in the code", "read in the documentation", "read in its issues"
    note: str = ""  # what is known beyond that where the suite has not reported it, and why it has not


class PackageFinding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault of one version of a package, as the suite reported it."""

    clause: str
    case: str  # id of the smallest case that shows it
    backend: str
    package: str
    version: str
    device: str
    repro: str  # one line
    observed: str
    expected: str
    documented: str  # where the package's own documentation speaks of it
    known: str  # id of a known fault, or empty: new
    reproduced: str = ""  # where the script of its case, alone in a process, has shown it again


class NotRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A backend, or a package without one, that the suite should judge and did not."""

    backend: str  # name of the backend, or empty where there is none
    package: str
    why: str


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A case that the suite has given up, which runs made before still have."""

    case: str
    why: str


class FindingsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A findings file, decoded."""

    finding: tuple[PackageFinding, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    withdrawn: tuple[Withdrawn, ...] = ()


def known_faults() -> tuple[KnownFault, ...]:
    """The faults that the suite is expected to find by itself."""
    data = resources.files("attnconform.conformance.report").joinpath(KNOWN_FAULTS).read_bytes()
    return msgspec.json.decode(data, type=tuple[KnownFault, ...])


def read_findings(path: Path) -> tuple[PackageFinding, ...]:
    """The findings of a file. Raises ValueError, in one line that names file and entry, where it is none."""
    return read_findings_file(path).finding


def read_findings_file(path: Path) -> FindingsFile:
    """A findings file. Raises ValueError, in one line that names file and entry, where it is none."""
    try:
        decoded = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), FindingsFile)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a findings file: {error}") from None
    known = {fault.id for fault in known_faults()}
    for number, finding in enumerate(decoded.finding, start=1):
        check_finding(finding, f"{path}: finding {number}", known)
    return decoded


def check_finding(finding: PackageFinding, where: str, known: set[str]) -> None:
    """Raises ValueError for a clause or a known fault that there is not, and for a reproducer of several lines."""
    if finding.clause not in CLAUSES:
        raise ValueError(f"{where}: clause is {finding.clause!r}, which SPEC.md does not have")
    if finding.known and finding.known not in known:
        raise ValueError(f"{where}: known is {finding.known!r}, which {KNOWN_FAULTS} does not have")
    if not finding.repro or "\n" in finding.repro:
        raise ValueError(f"{where}: repro is {finding.repro!r}, but must be one line")


def found_of(known: KnownFault, findings: tuple[PackageFinding, ...]) -> tuple[PackageFinding, ...]:
    """The findings that stand for a known fault; none where the suite has not reported it."""
    return tuple(finding for finding in findings if finding.known == known.id)
