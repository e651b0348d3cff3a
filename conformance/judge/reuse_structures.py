"""Block masks that a backend cuts out of larger ones, carries to pages and counts."""

from dataclasses import fields

import numpy as np

from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.rule_draws import drawn_extent, drawn_rule
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.block_structures import NUM_DRAWS, compare_blocks
from attnconform.conformance.judge.offering import ask, check_refuses, lacks, wrong
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.verdict import Finding
from attnconform.conformance.structures import MaskOfLength, SlicedRows
from attnconform.reference.block_mask import BlockMask, build_block_mask
from attnconform.reference.blocks.build import Extent, element_mask, rule_block_mask
from attnconform.reference.blocks.physical import PhysicalLists, decode_physical, to_physical
from attnconform.reference.blocks.reuse import crop_failures
from attnconform.reference.blocks.statistics import block_statistics
from attnconform.reference.coordinates import BoolArray
from attnconform.reference.rules import And, Causal, MaskRule, PrefixLM, Window

MAX_SEQLEN = 11
SIZES = (2, 4)  # query and kv block size of the masks that are cropped


@checks("BLOCK-SLICE", "BLOCK-OFFSET")
def check_slices(trial: Trial) -> list[Finding]:
    """Rows for a decode step keep their blocks, and partial blocks ask the mask of the rows' own positions."""
    if lacks(trial, "slice_rows"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        extent = drawn_extent(draw)
        rule = drawn_rule(draw, extent.seqlen_kv)
        start, stop = drawn_rows(draw, extent)
        got: SlicedRows = ask(trial, "slice_rows", rule, extent, start, stop)
        mask = element_mask(rule, extent)[:, start:stop]
        if not np.array_equal(got.element_mask, mask):
            findings.append(wrong(f"rows {start} to {stop} ask the mask of other positions", "BLOCK-OFFSET"))
        found = compare_blocks(got.blocks, mask, (extent.q_block_size, extent.kv_block_size), "BLOCK-SLICE")
        findings += [wrong(f"rows {start} to {stop}: {f.message}", *f.clauses) for f in found[:1]]
    extent = Extent(seqlen_q=8, seqlen_kv=8, q_block_size=4, kv_block_size=4)
    what = "rows 7 to 9 of a block mask for 8"
    return findings + check_refuses(trial, "BLOCK-SLICE", what, "slice_rows", Causal(), extent, 7, 9)


def drawn_rows(draw: Draw, extent: Extent) -> tuple[int, int]:
    """Rows that begin a block, or that lie within one."""
    start = draw.integer(0, extent.seqlen_q - 1)
    end_of_block = min((start // extent.q_block_size + 1) * extent.q_block_size, extent.seqlen_q)
    return start, draw.integer(start + 1, extent.seqlen_q if start % extent.q_block_size == 0 else end_of_block)


def of_rule(rule: MaskRule) -> MaskOfLength:
    """A rule as the square mask of any length."""

    def mask_of(seqlen: int) -> BoolArray:
        return element_mask(rule, Extent(seqlen_q=seqlen, seqlen_kv=seqlen, q_block_size=1, kv_block_size=1))

    return mask_of


def last_key(seqlen: int) -> BoolArray:
    """Every query sees the last key alone."""
    return np.broadcast_to(np.arange(seqlen) == seqlen - 1, (1, seqlen, seqlen)).copy()


def ring(seqlen: int) -> BoolArray:
    """Every query sees the two positions next to it, around the end."""
    distance = np.abs(np.arange(seqlen)[:, None] - np.arange(seqlen))
    return np.asarray(np.minimum(distance, seqlen - distance) <= 1)[None]


def mirrored(seqlen: int) -> BoolArray:
    """A rule that is symmetric about the middle of the sequence."""
    return np.asarray(np.arange(seqlen)[:, None] + np.arange(seqlen) <= seqlen)[None]


RULES_OF_LENGTH: dict[str, MaskOfLength] = {
    "causal": of_rule(Causal()),
    "causal window": of_rule(And((Causal(), Window(left=3)))),
    "prefix": of_rule(PrefixLM((5,))),
    "last key": last_key,
    "ring": ring,
    "mirrored": mirrored,
}
NUM_CROPPABLE = 3  # the first ones look at positions alone


def drawn_rules_of_length(trial: Trial) -> list[tuple[str, MaskOfLength]]:
    """A rule of two positions and one that looks at the length; other ones in another case."""
    draw, rules = Draw(trial.case.seed), list(RULES_OF_LENGTH.items())
    return [draw.choice(rules[:NUM_CROPPABLE]), draw.choice(rules[NUM_CROPPABLE:])]


@checks("BLOCK-CROP")
def check_crops(trial: Trial) -> list[Finding]:
    """A block mask that was cropped is the one that a rebuild gives, or was not cropped at all."""
    if lacks(trial, "crop"):
        return []
    findings = []
    sizes = {"q_block_size": SIZES[0], "kv_block_size": SIZES[1]}
    for name, mask_of in drawn_rules_of_length(trial):
        largest = build_block_mask(mask_of(MAX_SEQLEN), **sizes)
        for seqlen in range(1, MAX_SEQLEN + 1):
            got: BlockMask | None = ask(trial, "crop", mask_of, largest, seqlen)
            found = [] if got is None else compare_blocks(got, mask_of(seqlen), SIZES, "BLOCK-CROP")
            findings += [wrong(f"{name} at length {seqlen}: {f.message}", *f.clauses) for f in found[:1]]
    return findings


@checks("BLOCK-ADMIT")
def check_admission(trial: Trial) -> list[Finding]:
    """No rule is admitted to cropping that differs from a rebuild at some length."""
    if lacks(trial, "admit"):
        return []
    findings = []
    for name, mask_of in drawn_rules_of_length(trial):
        for size in (1, 2, 4):
            sizes = {"q_block_size": size, "kv_block_size": size}
            differs = crop_failures(mask_of, max_seqlen=MAX_SEQLEN, lengths=range(MAX_SEQLEN), **sizes)
            if differs and ask(trial, "admit", mask_of, MAX_SEQLEN, size, size):
                message = f"{name} is admitted with blocks of {size}, and differs from a rebuild at {differs}"
                findings.append(wrong(message, "BLOCK-ADMIT"))
    return findings


@checks("BLOCK-PHYSICAL", "BLOCK-UNTOUCHED")
def check_physical(trial: Trial) -> list[Finding]:
    """Listed blocks become the slots of their tokens, positions beside them, and the logical lists stay."""
    if lacks(trial, "to_physical"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for i in range(NUM_DRAWS):
        extent = drawn_extent(draw)
        rule, page_size = drawn_rule(draw, extent.seqlen_kv), draw.choice((1, 2, 3, 4, 8))
        num_pages = -(-extent.seqlen_kv // page_size)
        # anywhere in the pool, or side by side in another order, where a run of pages is easily taken for one in order
        table = np.array(draw.shuffled(range(40))[:num_pages] if i % 2 else draw.shuffled(range(9, 9 + num_pages)))
        blocks, kept = (rule_block_mask(rule, extent) for _ in range(2))
        got = ask(trial, "to_physical", blocks, table, page_size, 40)
        wanted = to_physical(kept, table, page_size=page_size, num_pages=40)
        for kind in ("full", "partial"):
            if not same_tokens(getattr(got, kind), getattr(wanted, kind), extent.seqlen_kv):
                message = f"the {kind} blocks of {extent} on pages {table.tolist()} of {page_size} hold other tokens"
                findings.append(wrong(message, "BLOCK-PHYSICAL"))
            if not same_arrays(getattr(blocks, kind), getattr(kept, kind)):
                message = f"the logical {kind} lists were written over"
                findings.append(wrong(message, "BLOCK-UNTOUCHED", state="FAIL_input_mutated"))
    return findings


def same_tokens(a: PhysicalLists, b: PhysicalLists, seqlen_kv: int) -> bool:
    """Whether every row loads the same (position, slot) pairs, in whatever order."""
    return [sorted(row) for row in decode_physical(a, seqlen_kv=seqlen_kv)] == [
        sorted(row) for row in decode_physical(b, seqlen_kv=seqlen_kv)
    ]


def same_arrays(a: object, b: object) -> bool:
    """Whether two dataclasses of arrays hold the same numbers."""
    return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@checks("BLOCK-STATISTICS", "COST-AMPLIFICATION")
def check_statistics(trial: Trial) -> list[Finding]:
    """Every figure of a block mask is the one that its lists give."""
    if lacks(trial, "statistics"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        extent = drawn_extent(draw)
        rule = drawn_rule(draw, extent.seqlen_kv)
        blocks, num_edges = rule_block_mask(rule, extent), int(element_mask(rule, extent).sum())
        got = ask(trial, "statistics", blocks, num_edges)
        wanted = block_statistics(blocks, num_edges=num_edges)
        for name in (field.name for field in fields(wanted)):
            if not np.isclose(getattr(got, name), getattr(wanted, name), rtol=1e-9, atol=0):
                message = f"{name} is {getattr(got, name)}, and {getattr(wanted, name)} by the lists"
                clause = "COST-AMPLIFICATION" if name == "amplification" else "BLOCK-STATISTICS"
                findings.append(wrong(message, clause, state="FAIL_value"))
    return findings
