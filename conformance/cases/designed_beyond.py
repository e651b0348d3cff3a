"""Designed cases beyond the arrays: values that an axis has for the forward alone, and lengths past a kernel's tiles.

A backward takes other code than its forward, so what the forward is asked of masks, rotation, epilogues, codes and
numbers is asked of the backward here, once each. Seeds begin elsewhere than those of `designed`, so that either list
grows without renaming the other's cases.
"""

from dataclasses import dataclass

import msgspec

from attnconform.conformance.cases.axes import Row
from attnconform.conformance.cases.designed import PAST_TILES, Change, designed_case, odd_numbers, unsplit
from attnconform.conformance.cases.generate import Lengths
from attnconform.conformance.cases.structure import Case, Structure
from attnconform.reference.candidates import HOLE
from attnconform.reference.dropout import Dropout
from attnconform.reference.rope import Rope
from attnconform.reference.rules import Alibi, PrefixLM

FIRST_SEED = 0x5EED_5000_0000
ROWS_PAST_64 = Lengths(q=(70,), kv=(70,))
ROWS_PAST_128 = Lengths(q=(131,), kv=(131,))
TENTH = 0.1  # no multiple of 1/256, so that a threshold of 8 bits is another rate
WIDE_SEED = 0xD1CE_0000_0001  # more than 32 bits
GENTLE_SLOPES = (0.5**8, 0.5**10)  # ALiBi that leaves keys hundreds of positions away their weight
OTHER_BASE = 500000.0  # of a rotary embedding, where most have 10000
FAR_SINKS = (120.0, -120.0, 90.0, 0.0)  # farther from any score than an exponential of float32 reaches
FULL_TILES = Lengths(q=(2, 1), kv=(150, 70))
NO_ROWS_FIRST = Lengths(q=(0, 3, 0, 2), kv=(20, 33, 17, 20))
# kernels that train have no float32; a mask leaves every row some keys and takes some
USUAL = {"dtype": "bfloat16", "phase": "chunk", "mask": "causal"}


@dataclass(frozen=True)
class Design:
    """What differs from a plain row and from USUAL."""

    row: dict[str, str]
    lengths: Lengths | None = None  # None: those of the row
    change: Change = unsplit  # of the structure that the row gives


def tenth_dropped(structure: Structure) -> Structure:
    """A rate that 8 bits do not hold, under a seed that 32 bits do not hold. [DROPOUT-COUNTER, DROPOUT-NUMERATOR]"""
    return msgspec.structs.replace(unsplit(structure), dropout=Dropout(TENTH, seed=WIDE_SEED))


def turned_by_another_base(structure: Structure) -> Structure:
    """A rotary embedding with another base than usual. [ROPE-PAIRS]"""
    rope = Rope(theta=OTHER_BASE, rotary_dim=structure.head_dim_qk, k_position="raw")
    return msgspec.structs.replace(unsplit(structure), rope=rope)


def gently_biased(structure: Structure) -> Structure:
    """Slopes under which every key of a long request weighs. [SCORE-ALIBI]"""
    return msgspec.structs.replace(unsplit(structure), score_rules=(Alibi(GENTLE_SLOPES),))


def far_sinks(structure: Structure) -> Structure:
    """Sinks that outweigh every key, and one that weighs nothing. [LSE-SINK, GRAD-SINK]"""
    return msgspec.structs.replace(unsplit(structure), sink_logits=FAR_SINKS)


def lists_of_full_tiles(structure: Structure) -> Structure:
    """Lists of exactly 64 and 128 entries. [SET-IDENTITY]"""
    assert structure.candidates is not None
    lists = tuple(tuple(range(i, i + 128 if i % 2 else i + 64)) for i in range(4)) + (tuple(range(64)),) * 2
    candidates = msgspec.structs.replace(structure.candidates, lists=lists)
    return msgspec.structs.replace(unsplit(structure), candidates=candidates)


def nothing_but_local_keys(structure: Structure) -> Structure:
    """Rows whose lists are empty or holes, and that see their window and the sink positions. [SET-UNION]"""
    assert structure.candidates is not None
    lists = tuple((entries, (), (HOLE,) * len(entries))[i % 3] for i, entries in enumerate(structure.candidates.lists))
    candidates = msgspec.structs.replace(structure.candidates, lists=lists)
    return msgspec.structs.replace(unsplit(structure), candidates=candidates)


def scaled_by_zero(structure: Structure) -> Structure:
    """A scale of 0, which is not the word for none: every key weighs the same. [SCORE-SCALE]"""
    return msgspec.structs.replace(unsplit(structure), sm_scale=0.0)


def queries_within_the_prefix(structure: Structure) -> Structure:
    """Prefixes that end with the last query but one, so that earlier ones see keys past themselves. [MASK-PREFIX]"""
    prefixes = tuple(length - 1 for length in structure.seqlens_kv)
    return msgspec.structs.replace(unsplit(structure), mask_rule=PrefixLM(prefixes))


FORWARD: dict[str, Design] = {
    "rows-past-every-usual-tile": Design({"phase": "prefill", "heads": "4/1"}, ROWS_PAST_128),
    "values-wider-than-queries": Design({"head_dim": "64/128"}),
    "turned-past-256": Design({"rope": "raw", "heads": "2/2"}, PAST_TILES, turned_by_another_base),
    "biased-past-256": Design({"dtype": "float32", "score": "alibi", "heads": "2/2"}, PAST_TILES, gently_biased),
    "a-tenth-dropped": Design({"dropout": "quarter"}, change=tenth_dropped),
    "sinks-out-of-reach": Design({"sink": "logits", "dtype": "float32"}, change=far_sinks),
    "lists-of-full-tiles": Design(
        {"granularity": "token", "sharing": "kv_head", "mask": "none"}, FULL_TILES, lists_of_full_tiles
    ),
    "nothing-but-local-keys": Design(
        {"granularity": "token", "sharing": "query_head", "listing": "holes", "local": "window_and_sinks"},
        change=nothing_but_local_keys,
    ),
    "a-scale-of-zero": Design({}, change=scaled_by_zero),
}
BACKWARD: dict[str, Design] = {
    "rows-past-a-usual-tile": Design({"phase": "prefill", "heads": "4/1", "sink": "logits"}, ROWS_PAST_64),
    "keys-past-every-usual-tile": Design({"heads": "2/2"}, PAST_TILES),
    "gradients-of-a-group-of-eight": Design({"heads": "8/1", "head_dim": "128/128"}),
    "gradients-of-wider-values": Design({"head_dim": "64/128"}),
    "gradients-of-its-own-numbers": Design(
        {"dtype": "float32", "score": "alibi_softcap", "sink": "logits", "lengths": "tile_edge"}, change=odd_numbers
    ),
    "gradients-of-an-odd-table": Design(
        {"dtype": "float32", "score": "relative", "lengths": "tile_edge"}, change=odd_numbers
    ),
    "under-a-prefix": Design(
        {"mask": "prefix", "phase": "prefill", "lengths": "tile_edge"}, change=queries_within_the_prefix
    ),
    "under-a-window-on-both-sides": Design({"mask": "window", "lengths": "tile_edge"}),
    "under-a-union": Design({"mask": "causal_or_document", "lengths": "tile_edge"}),
    "under-a-registered-mask": Design({"mask": "custom", "lengths": "tile_edge"}),
    "turned-with-its-neighbour": Design({"rope": "raw_interleaved"}),
    "rectified": Design({"epilogue": "relu"}),
    "codes-with-scales-of-channels": Design({"quant": "int8_channel"}),
    "far-past-the-cap": Design({"score": "softcap", "values": "extreme"}),
    "scores-past-exponentials": Design({"values": "extreme"}),
    "gradients-of-a-tenth-dropped": Design({"dropout": "quarter"}, change=tenth_dropped),
    "requests-without-rows": Design({}, NO_ROWS_FIRST),
    "gradients-of-sinks-out-of-reach": Design({"sink": "logits", "dtype": "float32"}, change=far_sinks),
}


def cases_beyond(plain: Row) -> tuple[Case, ...]:
    """One case a design; `plain` has the axis values that neither a design nor USUAL names."""
    designs = [("forward", slug, design) for slug, design in FORWARD.items()]
    designs += [("backward", slug, design) for slug, design in BACKWARD.items()]
    return tuple(
        designed_case(
            operation, slug, {**plain, **USUAL, **design.row}, FIRST_SEED + 8 * i + 1, design.lengths, design.change, ()
        )
        for i, (operation, slug, design) in enumerate(designs)
    )
