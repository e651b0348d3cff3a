"""L2 and L3 as they are frozen: whole cases, compressed, so that no generator's or library's version moves an id."""

import lzma
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec

from attnconform.conformance.cases.structure import Case

FROZEN_LEVELS = ("L2", "L3")


def file_name(level: str) -> str:
    """The file of a level's own cases, beside this module."""
    return f"{level.lower()}.json.xz"


@cache
def frozen_cases(level: str) -> tuple[Case, ...]:
    """The cases that a level adds to the one below it. A second, whatever their number."""
    data = resources.files("attnconform.conformance.cases").joinpath(file_name(level)).read_bytes()
    return msgspec.json.decode(lzma.decompress(data), type=tuple[Case, ...])


def write_frozen(folder: Path, level: str, cases: tuple[Case, ...]) -> Path:
    """Writes a level's own cases; the same cases give the same bytes."""
    path = folder / file_name(level)
    path.write_bytes(lzma.compress(msgspec.json.encode(cases, order="deterministic"), preset=6))
    return path
