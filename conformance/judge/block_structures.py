"""Block masks that a backend builds, decodes, turns around and combines, against the reference's, block by block."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.rule_draws import EDGE_LENGTHS, drawn_extent, drawn_mask, drawn_rule
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.offering import MAX_LISTED, ask, check_refuses, lacks, wrong
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.verdict import Finding
from attnconform.reference.block_mask import BlockLists, BlockMask, block_view, build_block_mask, decode_block_mask
from attnconform.reference.blocks.algebra import listed_pairs, pairs_of
from attnconform.reference.blocks.build import element_mask, rule_block_mask
from attnconform.reference.cache import PagedCache
from attnconform.reference.coordinates import BoolArray
from attnconform.reference.formats import dense_masks
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import And, Causal, Document, MaskRule, Or, PrefixLM

# query and kv block sizes that each problem is built with; blocks of one key are more than a word has bits
BLOCK_SIZES = ((1, 4), (2, 3), (4, 16), (3, 1))
NUM_DRAWS = 4  # drawn inputs of each kind a case


@checks(
    "BLOCK-COMPLETE", "BLOCK-EXCLUSIVE", "BLOCK-FULL", "BLOCK-RAGGED", "BLOCK-EXTENT", "BLOCK-CANDIDATES",
    "BLOCK-BROADCAST-HEADS", "BLOCK-BROADCAST-BATCH",
)  # fmt: skip
def check_block_masks(trial: Trial) -> list[Finding]:
    """Block masks of the case's problem: every edge listed, no forbidden element in a full block, right lengths."""
    if lacks(trial, "build_block_mask"):
        return []
    wanted = dense_masks(trial.problem)
    findings = []
    for q_block_size, kv_block_size in BLOCK_SIZES:
        built: Sequence[BlockMask] = ask(trial, "build_block_mask", trial.problem, q_block_size, kv_block_size)
        if len(built) not in (1, len(wanted)):
            return [wrong(f"{len(built)} block masks for {len(wanted)} requests", "BLOCK-BROADCAST-BATCH")]
        for request, mask in enumerate(wanted):
            blocks = built[request if len(built) > 1 else 0]
            why = broadcast_clauses(trial, blocks, shared=len(built) < len(wanted))
            found = compare_blocks(blocks, mask, (q_block_size, kv_block_size), *why)
            findings += [at_request(finding, request) for finding in found]
    return findings


@checks("BLOCK-BROADCAST-BATCH", "BLOCK-COMPLETE", "BLOCK-FULL")
def check_batch_masks(trial: Trial) -> list[Finding]:
    """Requests of equal lengths with other documents each get lists that are right for them."""
    if lacks(trial, "build_block_mask"):
        return []
    problem = two_documents(Draw(trial.case.seed))
    built: Sequence[BlockMask] = ask(trial, "build_block_mask", problem, 2, 2)
    findings = []
    for request, mask in enumerate(dense_masks(problem)):
        blocks = built[request if len(built) > 1 else 0]
        found = compare_blocks(blocks, mask, (2, 2), "BLOCK-BROADCAST-BATCH")
        findings += [at_request(finding, request) for finding in found]
    return findings


def two_documents(draw: Draw) -> AttentionProblem:
    """Two requests of eight rows, each of two documents that meet elsewhere."""
    first = draw.integer(1, 3)
    starts = ((0, first), (0, first + draw.integer(2, 4)))
    return AttentionProblem(
        qo_indptr=np.array([0, 8, 16]),
        seqlen_kv=np.array([8, 8]),
        q_offset=np.array([0, 0]),
        num_qo_heads=2,
        num_kv_heads=1,
        head_dim_qk=1,
        head_dim_vo=1,
        cache=PagedCache(page_size=4, num_pages=4, page_table=np.arange(4).reshape(2, 2)),
        sm_scale=1.0,
        mask_rule=And((Causal(), Document(starts))),
    )


def broadcast_clauses(trial: Trial, blocks: BlockMask, *, shared: bool) -> tuple[str, ...]:
    """Clauses that a wrong block is likeliest to break, from how the lists are shared."""
    clauses = ["BLOCK-BROADCAST-BATCH"] if shared else []
    if blocks.num_heads < trial.problem.num_qo_heads:
        clauses.append("BLOCK-BROADCAST-HEADS")
    if trial.problem.candidates is not None:
        clauses.append("BLOCK-CANDIDATES")
    return tuple(clauses)


def at_request(finding: Finding, request: int) -> Finding:
    """The finding with the request it is about."""
    return wrong(f"request {request}: {finding.message}", *finding.clauses, state=finding.state)


def compare_blocks(
    blocks: BlockMask,
    mask: BoolArray,  # (num_heads, seqlen_q, seqlen_kv) that the lists must stand for
    sizes: tuple[int, int],
    *why: str,  # clauses that explain a wrong block beside the clause that it breaks
) -> list[Finding]:
    """Everything wrong with the lists of a block mask; lists of one head serve all heads."""
    misfit = misfits(blocks, mask, sizes)
    if misfit:
        return [wrong(misfit[0], *why, "BLOCK-EXTENT")]
    columns = max(blocks.num_kv_blocks, 1)
    full, partial = (pairs_of(lists, columns) for lists in (blocks.full, blocks.partial))
    listed, times = np.unique(np.concatenate([full, partial]), return_counts=True)
    if (times > 1).any():
        return [wrong(f"{place(listed[times > 1][0], blocks)} is listed twice", *why, "BLOCK-EXCLUSIVE")]
    cells, exists = block_view(mask, *sizes), block_view(np.ones_like(mask), *sizes)
    some = cells.any(axis=(-2, -1))
    every = (cells | ~exists).all(axis=(-2, -1))
    spread = (len(mask), blocks.num_q_blocks, blocks.num_kv_blocks)
    is_listed, is_full = (grid(pairs, blocks, spread) for pairs in (listed, full))
    return [
        *_bad_blocks(some & ~is_listed, blocks, "holds an edge and is not listed", why, "BLOCK-COMPLETE"),
        *_bad_blocks(is_full & ~every, blocks, "is full and holds a forbidden element", why, "BLOCK-FULL"),
    ]


def misfits(blocks: BlockMask, mask: BoolArray, sizes: tuple[int, int]) -> list[str]:
    """What of a block mask does not fit the data, before its blocks can be compared."""
    found = []
    for name, got, wanted in (
        ("seqlen_q", blocks.seqlen_q, mask.shape[1]),
        ("seqlen_kv", blocks.seqlen_kv, mask.shape[2]),
        ("q_block_size", blocks.q_block_size, sizes[0]),
        ("kv_block_size", blocks.kv_block_size, sizes[1]),
    ):
        if got != wanted:
            found.append(f"{name} is {got}, and {wanted} in the data")
    if blocks.num_heads not in (1, len(mask)):
        found.append(f"num_heads is {blocks.num_heads} for {len(mask)} heads")
    for name, lists in (("full", blocks.full), ("partial", blocks.partial)):
        if len(lists.indptr) != blocks.num_rows + 1 or lists.indptr[-1] != len(lists.indices):
            found.append(f"{name}.indptr has {len(lists.indptr)} entries for {blocks.num_rows} block rows")
            continue
        outside = lists.indices[(lists.indices < 0) | (lists.indices >= blocks.num_kv_blocks)]
        if outside.size:
            found.append(f"{name} lists block {int(outside[0])}, and there are {blocks.num_kv_blocks}")
    return found


def grid(pairs: np.ndarray, blocks: BlockMask, spread: tuple[int, int, int]) -> BoolArray:
    """Listed pairs as (num_heads, block rows, block columns), one head's for all where there is one."""
    flat = np.zeros(blocks.num_rows * blocks.num_kv_blocks, dtype=bool)
    flat[pairs] = True
    return np.broadcast_to(flat.reshape(blocks.num_heads, blocks.num_q_blocks, blocks.num_kv_blocks), spread)


def place(pair: int, blocks: BlockMask) -> str:
    """Where a (row, column) pair stands."""
    row, column = divmod(int(pair), blocks.num_kv_blocks)
    return f"head {row // blocks.num_q_blocks}, block row {row % blocks.num_q_blocks}, block column {column}"


def _bad_blocks(bad: BoolArray, blocks: BlockMask, what: str, why: tuple[str, ...], clause: str) -> list[Finding]:
    findings = []
    for head, row, column in np.argwhere(bad)[:MAX_LISTED].tolist():
        ends = (row + 1) * blocks.q_block_size > blocks.seqlen_q, (column + 1) * blocks.kv_block_size > blocks.seqlen_kv
        ragged = ("BLOCK-RAGGED",) if any(ends) else ()
        message = f"head {head}, block row {row}, block column {column} {what}"
        findings.append(wrong(message, *why, clause, *ragged))
    return findings


@checks("BLOCK-INTERVAL")
def check_interval_masks(trial: Trial) -> list[Finding]:
    """Block masks from interval ends list exactly what the elements say, for drawn compositions of rules."""
    if lacks(trial, "interval_block_mask"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for request in (0, 1) * (NUM_DRAWS // 2):
        extent = drawn_extent(draw)
        rule = drawn_rule(draw, extent.seqlen_kv)
        if request:
            extent = replace(extent, q_offset=draw.choice((-2, extent.q_offset // 2, extent.q_offset + 3)))
            rule = behind_another_request(rule)
        got: BlockMask = ask(trial, "interval_block_mask", rule, request, extent)
        mask, sizes = element_mask(rule, extent, request=request), (extent.q_block_size, extent.kv_block_size)
        found = compare_blocks(got, mask, sizes, "BLOCK-INTERVAL")
        exact = build_block_mask(mask, q_block_size=sizes[0], kv_block_size=sizes[1])
        if not found and not np.array_equal(listed_pairs(got), listed_pairs(exact)):
            found = [wrong("lists a block without an edge", "BLOCK-INTERVAL")]
        if not found and len(got.full.indices) != len(exact.full.indices):
            found = [wrong("calls a block of all edges partial", "BLOCK-INTERVAL")]
        findings += [wrong(f"{rule}, {extent}: {f.message}", *f.clauses) for f in found]
    return findings


def behind_another_request(rule: MaskRule) -> MaskRule:
    """A rule of one request as that of the second of two; the first one has no prefix and one document."""
    match rule:
        case And(parts) | Or(parts):
            return type(rule)(tuple(behind_another_request(part) for part in parts))
        case PrefixLM(prefix_len):
            return PrefixLM((0, *prefix_len))
        case Document(starts):
            return Document(((0,), *starts))
        case _:
            return rule


@checks("BLOCK-CONSERVATIVE")
def check_classification(trial: Trial) -> list[Finding]:
    """A block mask made of two bounds is right for a mask anywhere between them."""
    if lacks(trial, "classify_blocks"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        shape = (1, draw.choice(EDGE_LENGTHS), draw.choice(EDGE_LENGTHS))
        inner, between, outer = (drawn_mask(draw, shape) for _ in range(3))
        between |= inner
        outer |= between
        sizes = (draw.choice((1, 2, 4)), draw.choice((1, 2, 4)))
        blocks = ask(trial, "classify_blocks", outer, inner, *sizes)
        for mask in (inner, between, outer):
            findings += compare_blocks(blocks, mask, sizes, "BLOCK-CONSERVATIVE")[:1]
    return findings


@checks("BLOCK-DECODE", "BLOCK-EXTENT")
def check_decoding(trial: Trial) -> list[Finding]:
    """Decoding gives the mask back, asks the element mask in partial blocks alone, and refuses other lengths."""
    if lacks(trial, "decode_block_mask"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        mask = drawn_mask(draw, (2, draw.choice(EDGE_LENGTHS), draw.choice(EDGE_LENGTHS)))
        blocks = build_block_mask(mask, q_block_size=draw.choice((1, 2, 4)), kv_block_size=draw.choice((1, 2, 4)))
        for element in (mask, drawn_mask(draw, mask.shape)):
            got = ask(trial, "decode_block_mask", blocks, element)
            if not np.array_equal(got, decode_block_mask(blocks, element)):
                findings.append(wrong("decodes to another mask than the format's loop", "BLOCK-DECODE"))
        for name, other in (("longer", 1), ("shorter", -1)):
            data = np.zeros((2, mask.shape[1], mask.shape[2] + other), dtype=bool)
            what = f"a block mask for data that is {name} by one key"
            findings += check_refuses(trial, "BLOCK-EXTENT", what, "decode_block_mask", blocks, data)
    return findings


@checks("BLOCK-TRANSPOSE")
def check_transpose(trial: Trial) -> list[Finding]:
    """The transposed lists hold the same pairs, each once, full and partial apart."""
    if lacks(trial, "transpose"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        mask = drawn_mask(draw, (draw.integer(1, 2), draw.choice(EDGE_LENGTHS), draw.choice(EDGE_LENGTHS)))
        blocks = build_block_mask(mask, q_block_size=draw.choice((1, 2)), kv_block_size=draw.choice((1, 2, 4)))
        got: BlockMask = ask(trial, "transpose", blocks)
        for kind in ("full", "partial"):
            ours, theirs = getattr(blocks, kind), getattr(got, kind)
            if sorted(triples(ours, blocks)) != sorted((h, row, column) for h, column, row in triples(theirs, got)):
                findings.append(wrong(f"the {kind} lists hold other pairs than before", "BLOCK-TRANSPOSE"))
    return findings


def triples(lists: BlockLists, blocks: BlockMask) -> list[tuple[int, int, int]]:
    """Every (head, row, column) that is listed, as often as it is."""
    return [
        (row // max(blocks.num_q_blocks, 1), row % max(blocks.num_q_blocks, 1), int(column))
        for row in range(len(lists.indptr) - 1)
        for column in lists.of(row)
    ]


@checks("BLOCK-INTERSECT", "BLOCK-UNITE")
def check_algebra(trial: Trial) -> list[Finding]:
    """Block masks combined by their lists are right for the masks combined."""
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        extent = drawn_extent(draw)
        rules = [drawn_rule(draw, extent.seqlen_kv) for _ in range(2)]
        a, b = (rule_block_mask(rule, extent) for rule in rules)
        dense_a, dense_b = (element_mask(rule, extent) for rule in rules)
        sizes = (extent.q_block_size, extent.kv_block_size)
        for method, clause, mask in (
            ("intersect", "BLOCK-INTERSECT", dense_a & dense_b),
            ("unite", "BLOCK-UNITE", dense_a | dense_b),
        ):
            if not lacks(trial, method):
                findings += compare_blocks(ask(trial, method, a, b), mask, sizes, clause)[:1]
    return findings
