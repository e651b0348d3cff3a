"""The canonical record of a run: JSON lines, a header, a line per case, and a footer that says it is whole."""

import hashlib
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
import torch

import attnconform
from attnconform.conformance.backend import Backend, Capabilities
from attnconform.conformance.cases.structure import Case, is_own, is_replayed
from attnconform.conformance.judge.verdict import NOT_RUN, CaseResult

SCHEMA_VERSION = 1


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """What ran, where, and on which matrix."""

    schema_version: int = SCHEMA_VERSION
    suite_version: str = attnconform.__version__
    suite_hash: str  # over the ids of the level's cases, whatever was selected of them
    level: str
    selected: int  # cases to come
    backend: str
    capabilities: Capabilities
    versions: dict[str, str]
    device: str
    started: str  # ISO 8601, UTC

    def announcing(self, selected: int) -> "Header":
        """The same header before another number of cases."""
        return msgspec.structs.replace(self, selected=selected)


class ResultLine(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """One case and its verdict."""

    case: Case
    result: CaseResult


class Footer(msgspec.Struct, frozen=True, kw_only=True, tag="footer"):
    """The end of a whole run."""

    counts: dict[str, int]  # state -> cases
    seconds: float


Line = Header | ResultLine | Footer


@dataclass(frozen=True)
class Run:
    """A results file, read back."""

    header: Header
    lines: tuple[ResultLine, ...]
    footer: Footer

    @property
    def results(self) -> list[CaseResult]:
        return [line.result for line in self.lines]

    @property
    def is_cut_off(self) -> bool:
        """Whether it ended before its last case; of read_run, never."""
        return len(self.lines) < self.header.selected


@dataclass(frozen=True)
class Verdict:
    """What a run says of a backend. Unsupported is never a pass, and nothing run is not a pass either."""

    conforming: int
    failing: int  # an unexpected pass is among them
    unsupported: int
    expected: int = 0  # failures that the run's expectations name
    own: int = 0  # of all that ran, cases of the backend's own domain
    of_trace: bool = False  # and not of the common matrix

    @property
    def ran(self) -> int:
        return self.conforming + self.failing + self.expected

    @property
    def declared_share(self) -> float:
        """How much of the common matrix, or of a trace's cases, the backend declares, 0 to 1."""
        return (self.ran - self.own) / max(self.ran - self.own + self.unsupported, 1)

    @property
    def declared_text(self) -> str:
        """What was asked of the backend: 4 of 568 cases of the common matrix, and 96 of its own domain."""
        whole = "the trace" if self.of_trace else "the common matrix"
        common = f"{self.ran - self.own} of {self.ran - self.own + self.unsupported} cases of {whole}"
        return f"{common} ({self.declared_share:.0%})" + (f", and {self.own} of its own domain" if self.own else "")

    @property
    def exit_code(self) -> int:
        """0 conforming, or failing as expected and no more; 1 failing otherwise; 3 nothing ran."""
        if self.failing:
            return 1
        return 0 if self.ran else 3

    @property
    def words(self) -> str:
        if not self.ran:
            return "NOTHING RAN"
        if self.failing:
            return "NOT CONFORMING"
        return "NOT CONFORMING, AS EXPECTED" if self.expected else "CONFORMING"


def verdict_of(results: Iterable[CaseResult]) -> Verdict:
    """Counts of a run's results."""
    every = list(results)
    counted = Counter(standing(result) for result in every)
    own = sum(is_own(result.case_id) and result.state not in NOT_RUN for result in every)
    of_trace = any(is_replayed(result.case_id) for result in every)
    return Verdict(
        counted["conforming"], counted["failing"], counted["unsupported"], counted["expected"], own, of_trace
    )


def standing(result: CaseResult) -> Literal["failing", "expected", "unsupported", "conforming"]:
    """What a result is to its run's verdict."""
    if result.is_failing:
        return "failing"
    if result.is_expected_failure:
        return "expected"
    return "unsupported" if result.state in NOT_RUN else "conforming"


def suite_hash(cases: Iterable[Case]) -> str:
    """Twelve hex digits of a level's case ids."""
    return hashlib.sha256("\n".join(sorted(c.id for c in cases)).encode()).hexdigest()[:12]


def make_header(backend: Backend, level: str, level_cases: Sequence[Case], selected: int) -> Header:
    """The header of a run that starts now."""
    device = torch.cuda.get_device_name(backend.device) if backend.device.startswith("cuda") else platform.processor()
    return Header(
        suite_hash=suite_hash(level_cases),
        level=level,
        selected=selected,
        backend=backend.name,
        capabilities=backend.capabilities,
        versions={"python": platform.python_version(), **{k: str(v) for k, v in backend.versions().items()}},
        device=device or platform.machine(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def encode_line(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def encode_run(run: Run) -> bytes:
    """The whole file of a run."""
    lines: list[Line] = [run.header, *run.lines, run.footer]
    return b"".join(encode_line(line) for line in lines)


def read_unfinished(path: Path) -> tuple[Header, list[ResultLine]] | None:
    """Header and whole result lines of a run that was cut off; None where there is nothing to go on from."""
    if not path.exists():
        return None
    lines: list[Line] = []
    for data in path.read_bytes().splitlines():
        try:
            lines.append(msgspec.json.decode(data, type=Line))
        except msgspec.DecodeError:
            break  # the line that was being written when the run ended
    if not lines or not isinstance(lines[0], Header):
        return None
    return lines[0], [line for line in lines[1:] if isinstance(line, ResultLine)]


def read_run(path: Path) -> Run:
    """A whole run. Raises ValueError, in one line that names the file and the line, where it is not one."""
    try:
        raw = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    lines: list[Line] = []
    for number, data in enumerate(raw, start=1):
        try:
            lines.append(msgspec.json.decode(data, type=Line))
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}:{number} is not a result line: {error}") from None
    match lines:
        case [Header() as header, *middle, Footer() as footer] if all(isinstance(m, ResultLine) for m in middle):
            results = tuple(m for m in middle if isinstance(m, ResultLine))
        case _:
            raise ValueError(f"{path} is not a whole run: a header, result lines and a footer are expected")
    if header.schema_version != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version is {header.schema_version}, but this reads {SCHEMA_VERSION}")
    if len(results) != header.selected:
        raise ValueError(f"{path} has {len(results)} results, but its header announces {header.selected}")
    return Run(header, results, footer)


def read_run_so_far(path: Path) -> Run:
    """A run, whole or cut off: of one that was cut off, its whole lines. Raises ValueError as read_run does."""
    try:
        return read_run(path)
    except ValueError:
        cut = read_unfinished(path)
        if cut is None or len(path.read_bytes().splitlines()) > 2 + len(cut[1]):
            raise  # more than the line that was being written cannot be read
        header, lines = cut
        if not 0 < len(lines) < header.selected or header.schema_version != SCHEMA_VERSION:
            raise
        return Run(header, tuple(lines), Footer(counts=Counter(line.result.state for line in lines), seconds=0.0))
