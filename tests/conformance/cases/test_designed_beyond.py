"""Designed cases beyond the arrays: each shows a mistake that no case of the arrays shows."""

import hashlib
from collections.abc import Iterator

import pytest
import torch

from attnconform.conformance.cases.designed_beyond import BACKWARD, FORWARD, USUAL, cases_beyond
from attnconform.conformance.cases.detectability import detect
from attnconform.conformance.cases.matrix import SMOKE_ROW
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations import DEVIATIONS

CASES = {case.id.split(".")[2].removeprefix("designed-"): case for case in cases_beyond(SMOKE_ROW)}
IDS_DIGEST = "cce1c952a91e88830ed9ce26b74557a23b9f4dad373433946b682dbd4563a734"
# slug -> deviations that it is there for
SHOWN = {
    "rows-past-every-usual-tile": ("counts-rows-from-their-tile",),
    "values-wider-than-queries": ("reads-values-to-the-query-dimension",),
    "turned-past-256": ("rotates-by-positions-in-bf16", "turns-by-the-usual-base"),
    "biased-past-256": ("biases-by-distances-in-bf16",),
    "a-tenth-dropped": ("drops-by-eight-bits", "loses-the-upper-half-of-the-seed"),
    "sinks-out-of-reach": ("exponentiates-a-sink-above-the-maximum",),
    "lists-of-full-tiles": ("loses-a-last-tile-of-entries-that-is-full",),
    "nothing-but-local-keys": ("leaves-a-row-without-entries",),
    "a-scale-of-zero": ("takes-a-scale-of-zero-for-none",),
    "rows-past-a-usual-tile": ("loses-dk-of-rows-past-a-tile",),
    "keys-past-every-usual-tile": ("loses-dq-of-keys-past-a-tile",),
    "gradients-of-a-group-of-eight": ("sums-the-first-heads-of-a-group", "leaves-the-rest-of-a-long-head-out-of-dq"),
    "gradients-of-wider-values": ("dots-dout-to-the-query-dimension",),
    "gradients-of-its-own-numbers": (
        "scales-by-the-head-dim-in-backward",
        "rounds-slopes-in-backward",
        "rounds-sinks-in-backward",
    ),
    "gradients-of-an-odd-table": ("scales-by-the-head-dim-in-backward",),
    "under-a-prefix": ("takes-a-prefix-for-causal-in-backward",),
    "under-a-window-on-both-sides": ("ignores-the-right-edge-in-backward",),
    "under-a-union": ("reads-or-as-and-in-backward",),
    "under-a-registered-mask": ("ignores-a-registered-mask-in-backward",),
    "turned-with-its-neighbour": ("turns-gradients-back-in-halves", "turns-the-whole-gradient-back"),
    "rectified": ("takes-relu-for-the-identity-in-backward",),
    "codes-with-scales-of-channels": ("gives-the-gradient-of-codes-of-channels",),
    "far-past-the-cap": ("computes-the-slope-by-exponentials",),
    "scores-past-exponentials": ("divides-exponentials-in-backward",),
    "gradients-of-a-tenth-dropped": ("forgets-dropout-in-the-backward",),
    "requests-without-rows": ("leaves-requests-without-rows-uncounted",),
    "gradients-of-sinks-out-of-reach": ("leaves-dsink-at-zero",),
}
PAIRS = [(slug, mistake) for slug, mistakes in SHOWN.items() for mistake in mistakes]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other's cores cost more than these small tensors do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_ids_are_frozen() -> None:
    ids = sorted(case.id for case in CASES.values())
    assert hashlib.sha256("\n".join(ids).encode()).hexdigest() == IDS_DIGEST


def test_every_design_is_there_for_a_deviation() -> None:
    assert set(CASES) == set(SHOWN) == {*FORWARD, *BACKWARD}


@pytest.mark.parametrize(("slug", "mistake"), PAIRS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_design_shows_the_mistake_that_it_is_there_for(slug: str, mistake: str) -> None:
    detection = detect(CASES[slug], DEVIATIONS[mistake])
    assert detection is not None
    assert detection.is_enough


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.id)
def test_a_case_has_the_usual_values_where_its_design_names_no_other(case: Case) -> None:
    design = {**FORWARD, **BACKWARD}[case.id.split(".")[2].removeprefix("designed-")]
    assert {axis: case.axes[axis] for axis in USUAL} == USUAL | {a: v for a, v in design.row.items() if a in USUAL}


def test_lengths_pass_the_tiles_that_kernels_have() -> None:
    assert min(CASES["rows-past-every-usual-tile"].structure.seqlens_q) > 128
    assert min(CASES["rows-past-a-usual-tile"].structure.seqlens_q) > 64
    assert min(CASES["keys-past-every-usual-tile"].structure.seqlens_kv) > 512
    lists = CASES["lists-of-full-tiles"].structure.candidates
    assert lists is not None
    assert {len(entries) for entries in lists.lists} == {64, 128}
