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
from attnconform.reference.epilogue import Gate
from attnconform.reference.rules import Alibi, RelativeBias, ScoreRule, SoftCap

FIRST_SEED = 0x5EED_4000_0000
EVERY_EDGE = Lengths(
    q=(0, 1, 1, 1, 0, 1, 1, 1, 1), kv=(0, 1, 15, 16, 17, 31, 32, 33, 97)
)  # of pages of 16, tiles of 32
LONG = Lengths(q=(2,), kv=(97,))
PAST_TILES = Lengths(q=(2,), kv=(521,))  # tiles of 128 and of 256 are several, and positions take more than 8 bits
PAST_TILES_ONE_ROW = Lengths(q=(1,), kv=(521,))
FOUR_PAGES = Lengths(q=(1,), kv=(57,))  # of 16 tokens
FAR_APART = 2**30 + 2**10  # elements from page to page: the last of five starts past 2^32
ODD = 0.7310585786300049  # no dtype of a parameter holds it but float64, and none of the halves comes near
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


def odd_numbers(structure: Structure) -> Structure:
    """A scale that is not 1 / sqrt(head_dim), and parameters that bfloat16 and float16 would round. [SCORE-SCALE]"""
    sinks, lists = structure.sink_logits, structure.candidates
    if lists is not None and lists.rank_bias is not None:
        lists = msgspec.structs.replace(lists, rank_bias=tuple(ODD * bias for bias in lists.rank_bias))
    return msgspec.structs.replace(
        unsplit(structure),
        candidates=lists,
        epilogue=tuple(
            Gate(tuple(ODD * (logit + 1) for logit in step.logits)) if isinstance(step, Gate) else step
            for step in structure.epilogue
        ),
        sm_scale=ODD * structure.sm_scale,
        score_rules=tuple(odd_rule(rule) for rule in structure.score_rules),
        sink_logits=None if sinks is None else tuple(ODD * (logit + 1) for logit in sinks),
    )


def odd_rule(rule: ScoreRule) -> ScoreRule:
    """A score rule whose numbers no half precision holds."""
    match rule:
        case Alibi(slopes):
            return Alibi(tuple(ODD * slope for slope in slopes))
        case SoftCap(cap):
            return SoftCap(ODD * cap)
        case RelativeBias(tables):
            return RelativeBias(tuple(tuple(ODD * (bias + 1) for bias in table) for table in tables))
        case _:
            return rule


def past_four_billion(structure: Structure) -> Structure:
    """Codes, a byte each, whose last page starts past element 2^32, where unsigned offsets wrap too. [COORD-WIDE]"""
    return msgspec.structs.replace(unsplit(structure), num_pages=5, page_table=((4, 1, 3, 2),), page_stride=FAR_APART)


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
        {"phase": "chunk", "mask": "causal", "values": "summed_out", "lengths": "tile_edge"}, None, unsplit,
        ("COORD-STRIDE",)
    ),
    "rows-before-the-first-token": (
        {"phase": "prefill", "mask": "causal", "empty": "first"}, Lengths(q=(5, 3), kv=(3, 20)),
        before_the_first_token, ()
    ),
}  # fmt: skip
# after those above, whose seeds follow from their places
FURTHER_DESIGNS: dict[str, tuple[dict[str, str], Lengths | None, Change, tuple[str, ...]]] = {
    "past-every-usual-tile": (
        {"phase": "chunk", "mask": "causal", "heads": "2/2", "values": "half_mass"}, PAST_TILES, unsplit,
        ("COORD-WIDE",)
    ),
    "lists-past-every-usual-tile": (
        {"granularity": "token", "sharing": "kv_head", "listing": "shuffled", "heads": "4/1", "values": "v_mean"},
        PAST_TILES_ONE_ROW, unsplit, ("COORD-WIDE",)
    ),
    "numbers-of-its-own": (
        {"phase": "chunk", "mask": "causal", "score": "alibi_softcap", "sink": "logits", "lengths": "tile_edge"}, None,
        odd_numbers, ()
    ),
    "table-of-odd-numbers": (
        {"phase": "chunk", "mask": "causal", "score": "relative", "lengths": "tile_edge"}, None, odd_numbers, ()
    ),
    "scale-of-its-own": ({"values": "peaked"}, None, odd_numbers, ()),
    "every-number-planned-again": (
        {"phase": "chunk", "granularity": "token", "sharing": "query_head", "listing": "shuffled", "form": "sequence",
         "mask": "causal", "sink": "logits", "quant": "mixed", "dropout": "quarter", "epilogue": "silu_gate",
         "lengths": "tile_edge"}, None, odd_numbers, ("PLAN-REPLAN",)
    ),
    "pages-past-four-billion-codes": (
        {"quant": "int8_tensor", "granularity": "token", "sharing": "kv_head"}, FOUR_PAGES, past_four_billion,
        ("COORD-WIDE",)
    ),
}  # fmt: skip


def designed_cases(plain: Row) -> tuple[Case, ...]:
    """One case a design; `plain` has the axis values that a design does not name."""
    designs = [("forward", slug, design) for slug, design in DESIGNS.items()]
    designs += [("backward", slug, design) for slug, design in BACKWARD_DESIGNS.items()]
    designs += [("forward", slug, design) for slug, design in FURTHER_DESIGNS.items()]
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
