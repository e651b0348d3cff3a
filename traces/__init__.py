"""Candidate traces: anonymized distributions of what sparse selectors picked, and rows drawn from them."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from attnconform.traces.anonymize import K_ANONYMITY, Histogram, anonymize
from attnconform.traces.fidelity import Fidelity, compare, compare_uniform
from attnconform.traces.format import GroupKey, Model, Selector, Source, Trace, TraceHeader, read_trace, write_trace
from attnconform.traces.statistics import STATISTICS, SelectedRows, compute_statistics
from attnconform.traces.synthesize import CandidateRows, synthesize

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "K_ANONYMITY",
    "STATISTICS",
    "CandidateRows",
    "Fidelity",
    "GroupKey",
    "Histogram",
    "Model",
    "SelectedRows",
    "Selector",
    "Source",
    "Trace",
    "TraceHeader",
    "anonymize",
    "bundled_traces",
    "compare",
    "compare_uniform",
    "compute_statistics",
    "read_trace",
    "synthesize",
    "write_trace",
]


def bundled_traces() -> dict[str, Traversable]:
    """The folders of the traces that come with the package, by name; each goes to read_trace."""
    here = resources.files("attnconform.traces")
    return {folder.name: folder for folder in here.iterdir() if folder.joinpath("header.json").is_file()}
