"""Cases of L1 that no row of the covering array makes: each one input that hid a real fault from other suites.

They complete the array, whose rows and ids stay as they are frozen.
"""

from collections.abc import Callable

import msgspec

from attnconform.conformance.cases.axes import Row
from attnconform.conformance.cases.clauses_of import clauses_of
from attnconform.conformance.cases.edges import odd_page_stride
from attnconform.conformance.cases.generate import Lengths, build_structure
from attnconform.conformance.cases.structure import Case, Structure, build_problem, named
from attnconform.conformance.views import Hints
from attnconform.reference.candidates import HOLE

FIRST_SEED = 0x5EED_4000_0000
EVERY_EDGE = Lengths(
    q=(0, 1, 1, 1, 0, 1, 1, 1, 1), kv=(0, 1, 15, 16, 17, 31, 32, 33, 97)
)  # of pages of 16, tiles of 32
LONG = Lengths(q=(2,), kv=(97,))
Change = Callable[[Structure], Structure]


def before_the_first_token(structure: Structure) -> Structure:
    """More query rows than committed tokens: the first rows stand before position 0. [MASK-OFFSET, EMPTY-OUT]"""
    return msgspec.structs.replace(structure, q_offset=(-2, 17))


def far_before_the_end(structure: Structure) -> Structure:
    """Queries whose causal mask hides most tiles, so that the last splits are empty. [MERGE-EMPTY]"""
    return msgspec.structs.replace(structure, q_offset=(10,))


def holes_before_all_else(structure: Structure) -> Structure:
    """Lists whose first tile is nothing but holes, and so the first split. [SET-HOLE, MERGE-EMPTY]"""
    assert structure.candidates is not None
    tile = structure.hints.tile_kv or 0
    lists = tuple(
        (HOLE,) * (tile + 5) + tuple(i for i in entries if i != HOLE) for entries in structure.candidates.lists
    )
    return msgspec.structs.replace(
        structure, candidates=msgspec.structs.replace(structure.candidates, lists=lists), hints=Hints(num_kv_splits=3)
    )


def misaligned(structure: Structure) -> Structure:
    """Pages an odd number of elements apart, where no wide load may start. [COORD-STRIDE]"""
    return msgspec.structs.replace(structure, page_stride=odd_page_stride(structure))


def unsplit(structure: Structure) -> Structure:
    """The number of splits is the backend's own choice. [MERGE-SPLIT]"""
    return msgspec.structs.replace(structure, hints=Hints())


# slug: what differs from a plain row, lengths where they are no axis value, what is changed then, further clauses
DESIGNS: dict[str, tuple[dict[str, str], Lengths | None, Change, tuple[str, ...]]] = {
    "every-edge-in-one-batch": (
        {"lengths": "empty_request", "values": "half_mass"}, EVERY_EDGE, unsplit, ("DETERMINISM-BATCH",)
    ),
    "every-edge-in-lists": (
        {"lengths": "empty_request", "granularity": "token", "sharing": "kv_head", "listing": "holes_and_duplicates",
         "dtype": "bfloat16"}, EVERY_EDGE, unsplit, ("DETERMINISM-BATCH",)
    ),
    "rows-before-the-first-token": (
        {"phase": "prefill", "mask": "causal", "empty": "first", "values": "v_mean"},
        Lengths(q=(5, 3), kv=(3, 20)), before_the_first_token, ()
    ),
    "last-splits-empty": (
        {"phase": "chunk", "mask": "causal", "splits": "8", "lengths": "long_and_short", "values": "v_mean"},
        LONG, far_before_the_end, ()
    ),
    "first-tile-of-holes": (
        {"granularity": "token", "sharing": "query_head", "listing": "holes", "splits": "3", "values": "v_mean",
         "lengths": "long_and_short"}, LONG, holes_before_all_else, ()
    ),
    "last-visible-of-a-window": (
        {"phase": "chunk", "mask": "causal_window", "values": "last_visible", "lengths": "tile_edge"}, None, unsplit, ()
    ),
    "first-hidden-of-a-window": (
        {"phase": "chunk", "mask": "causal_window", "values": "first_hidden", "lengths": "tile_edge"}, None, unsplit, ()
    ),
    "last-visible-of-a-document": (
        {"phase": "chunk", "mask": "document", "values": "last_visible", "dtype": "bfloat16"}, None, unsplit, ()
    ),
    "first-hidden-of-a-document": (
        {"phase": "chunk", "mask": "document", "values": "first_hidden", "dtype": "bfloat16"}, None, unsplit, ()
    ),
    "near-ties": ({"phase": "chunk", "mask": "causal", "values": "near_ties", "dtype": "float16"}, None, unsplit, ()),
    "misaligned-pages": (
        {"strides": "interleaved", "layout": "HND", "dtype": "bfloat16", "mask": "causal", "phase": "chunk",
         "base": "misaligned"},
        None, misaligned, ("COORD-STRIDE",)
    ),
}  # fmt: skip
BACKWARD_DESIGNS: dict[str, tuple[dict[str, str], Lengths | None, Change, tuple[str, ...]]] = {
    "loss-is-the-sum-of-out": (
        {"phase": "chunk", "mask": "causal", "values": "summed_out", "lengths": "tile_edge"}, None, unsplit, ()
    ),
    "rows-before-the-first-token": (
        {"phase": "prefill", "mask": "causal", "empty": "first"}, Lengths(q=(5, 3), kv=(3, 20)),
        before_the_first_token, ()
    ),
}  # fmt: skip


def designed_cases(plain: Row) -> tuple[Case, ...]:
    """One case a design; `plain` has the axis values that a design does not name."""
    designs = [("forward", slug, design) for slug, design in DESIGNS.items()]
    designs += [("backward", slug, design) for slug, design in BACKWARD_DESIGNS.items()]
    return tuple(
        designed_case(operation, slug, {**plain, **changes}, FIRST_SEED + 8 * i + 1, lengths, change, further)
        for i, (operation, slug, (changes, lengths, change, further)) in enumerate(designs)
    )  # seeds are 1 modulo 8, so that every batch is asked in reverse as well


def designed_case(
    operation: str,
    slug: str,
    row: dict[str, str],
    seed: int,
    lengths: Lengths | None,
    change: Change,
    further: tuple[str, ...],
) -> Case:
    """One design as a case."""
    structure = change(build_structure(row, seed, lengths=lengths))
    clauses = clauses_of(operation, row, build_problem(structure))
    case = Case(
        id="",
        level="L1",
        operation=operation,  # type: ignore[arg-type]  # forward or backward here
        structure=structure,
        values=row["values"],  # type: ignore[arg-type]
        seed=seed,
        clauses=tuple(sorted({*clauses, *further})),
        axes=row,
    )
    return named(case, f"designed-{slug}")
