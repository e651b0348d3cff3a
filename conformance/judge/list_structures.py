"""Candidate lists, block tables, task tables and tiers that a backend makes, against the reference's, item by item."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import numpy as np

from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.block_structures import NUM_DRAWS
from attnconform.conformance.judge.offering import MAX_LISTED, ask, check_refuses, lacks, wrong
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.verdict import Finding
from attnconform.conformance.structures import Canonical
from attnconform.reference.block_expansion import BlockMembers, decode_members
from attnconform.reference.block_mask import BlockLists
from attnconform.reference.blocks.table import BlockTable, decode_block_table
from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import BoolArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.formats import (
    csr_to_dense,
    csr_to_fixed_width,
    decode_csr,
    decode_fixed_width,
    lists_to_csr,
)
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.steps import Steps
from attnconform.reference.task_table import TaskTable, build_task_table, decode_task_table
from attnconform.reference.tiers import optimal_tiers, smallest_tier, tier_cost

Lists = list[list[int]]
TARGET = 3  # entries a task
LONG = 40  # entries of one list: past a warp, and many tasks
TILE = 64  # entries that a kernel may look at together


@checks(
    "SET-IDENTITY", "SET-DUPLICATE", "SET-ORDER", "SET-HOLE", "SET-UNION", "SET-ALIAS", "COORD-SLOT", "COORD-RENUMBER",
    "BLOCK-EXPAND", "GQA-LISTS",
)  # fmt: skip
def check_canonical(trial: Trial) -> list[Finding]:
    """The candidates of every row and head are the right positions, each once, at their slots."""
    if lacks(trial, "canonicalize"):
        return []
    problems = [trial.problem]
    if trial.backend.capabilities.declares("listing", "holes_and_duplicates"):
        problems += repeated_a_tile_on(trial.problem)
    return [finding for problem in problems for finding in _canonical_findings(trial, problem)][:MAX_LISTED]


def repeated_a_tile_on(problem: AttentionProblem) -> Iterator[AttentionProblem]:
    """The same sets, each list once more behind a tile of holes: what looks for duplicates in one tile finds none."""
    lists = problem.candidates
    if lists is None or lists.form != "set":
        return
    entries = [lists.entries(i).tolist() for i in range(lists.num_lists)]
    indptr, indices = lists_to_csr([[*one, *[HOLE] * TILE, *one] for one in entries])
    yield replace(problem, candidates=replace(lists, indptr=indptr, indices=indices))


def _canonical_findings(trial: Trial, problem: AttentionProblem) -> list[Finding]:
    steps, findings = Steps(), []
    got: Canonical = ask(trial, "canonicalize", problem)
    if len(got.indptr) != problem.total_q * problem.num_qo_heads + 1:
        return [wrong(f"indptr has {len(got.indptr)} entries", "GQA-LISTS")]
    rows = ((where, h) for where in problem.rows() for h in range(problem.num_qo_heads))
    for i, (where, h) in enumerate(rows):
        at = slice(int(got.indptr[i]), int(got.indptr[i + 1]))
        listed = steps.candidates(problem, where, h)
        slot_of = dict(zip(listed.values.tolist(), steps.slots(problem, where, listed).values.tolist(), strict=True))
        found = compare_sets(got.positions[at].tolist(), list(slot_of))
        if not found and dict(zip(got.positions[at].tolist(), got.slots[at].tolist(), strict=False)) != slot_of:
            found = [wrong("positions lie in other slots", "COORD-SLOT", "COORD-RENUMBER")]
        findings += [wrong(f"row {where.row}, head {h}: {f.message}", *f.clauses) for f in found]
    return findings


def compare_sets(got: list[int], wanted: list[int]) -> list[Finding]:
    """What is missing from a set, too much in it, or twice."""
    if len(set(got)) < len(got):
        return [wrong("a position stands twice", "SET-DUPLICATE")]
    missing, extra = sorted(set(wanted) - set(got)), sorted(set(got) - set(wanted))
    if missing:
        return [wrong(f"position {missing[0]} is missing", "SET-IDENTITY", "SET-ALIAS", "SET-UNION", "BLOCK-EXPAND")]
    if extra:
        return [wrong(f"position {extra[0]} is too much", "SET-HOLE", "SET-IDENTITY", "BLOCK-EXPAND")]
    return []


def drawn_lists(draw: Draw, *, holes: bool = False) -> Lists:
    """Ragged lists: empty ones, long ones, duplicates, any order, and holes where they are wanted."""
    lengths = [*draw.integers(4, 0, 5), 0, 9, LONG]
    lists = [draw.integers(length, 0, 20) for length in draw.shuffled(lengths)]
    if holes:
        lists = [draw.shuffled([*entries, *[HOLE] * draw.integer(0, 2)]) for entries in lists]
    return lists


@checks("FORMAT-CSR", "FORMAT-FIXED-WIDTH", "FORMAT-WIDTH", "FORMAT-ROUND-TRIP", "FORMAT-DENSE", "SET-HOLE")
def check_list_forms(trial: Trial) -> list[Finding]:
    """Every form of a list stands for the list, to and fro; what cannot is refused."""
    draw, findings = Draw(trial.case.seed), []
    for i in range(NUM_DRAWS):
        lists = drawn_lists(draw, holes=bool(i % 2))
        findings += [
            *_csr_findings(trial, lists),
            *_fixed_width_findings(trial, lists),
            *_dense_findings(trial, lists),
        ]
    return findings


def _csr_findings(trial: Trial, lists: Lists) -> list[Finding]:
    if lacks(trial, "decode_csr"):
        return []
    indptr, indices = lists_to_csr(lists)
    findings = []
    if ask(trial, "decode_csr", indptr, indices) != decode_csr(indptr, indices):
        findings.append(wrong(f"indptr {indptr.tolist()} is read as other lists", "FORMAT-CSR"))
    falling = indptr.copy()
    falling[-2] = falling[-1] + 1
    findings += check_refuses(trial, "FORMAT-CSR", "an indptr that falls", "decode_csr", falling, indices)
    return findings


def _fixed_width_findings(trial: Trial, lists: Lists) -> list[Finding]:
    findings = []
    indptr, indices = lists_to_csr(lists)
    width = max(map(len, lists)) + 1
    kept = decode_csr(indptr, indices)
    if not lacks(trial, "to_fixed_width"):
        fixed = ask(trial, "to_fixed_width", indptr, indices, width)
        if decode_fixed_width(fixed) != kept:
            findings.append(wrong(f"{lists} stand at fixed width as {fixed.tolist()}", "FORMAT-FIXED-WIDTH"))
        too_narrow = ("to_fixed_width", indptr, indices, width - 2)
        findings += check_refuses(trial, "FORMAT-WIDTH", "a list longer than the width", *too_narrow)
    if not lacks(trial, "from_fixed_width"):
        fixed = csr_to_fixed_width(indptr, indices, width)
        back = ask(trial, "from_fixed_width", fixed)
        if decode_csr(*back) != kept:
            findings.append(wrong(f"{fixed.tolist()} comes back as {decode_csr(*back)}", "FORMAT-ROUND-TRIP"))
    return findings


def _dense_findings(trial: Trial, lists: Lists) -> list[Finding]:
    if lacks(trial, "to_dense"):
        return []
    # far enough apart for several words of a row of bits
    indptr, indices = lists_to_csr([[t if t == HOLE else 4 * t + 3 for t in entries] for entries in lists])
    if np.array_equal(ask(trial, "to_dense", indptr, indices, 84), csr_to_dense(indptr, indices, 84)):
        return []
    return [wrong(f"{lists} stand as other dense rows", "FORMAT-DENSE")]


@checks("FORMAT-TABLE", "FORMAT-WIDTH")
def check_block_tables(trial: Trial) -> list[Finding]:
    """A block table's counts decide, its axes of size 1 broadcast, and no list is cut."""
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        num_blocks = draw.integer(3, 6)
        lists = [block_lists(draw, num_blocks) for _ in range(2)]
        wanted = [lists_as_grid(one, num_blocks) for one in lists]
        if not lacks(trial, "to_block_table"):
            made = ask(trial, "to_block_table", lists, 2, num_blocks)
            got = decode_block_table(made, batch_size=2, num_heads=2, num_kv_blocks=num_blocks)
            if not np.array_equal(got, np.stack(wanted)):
                findings.append(wrong("the table holds other blocks than the lists", "FORMAT-TABLE"))
            longest = max(int(np.diff(one.indptr).max()) for one in lists)
            too_narrow = ("to_block_table", lists, 2, longest - 1)
            findings += check_refuses(trial, "FORMAT-WIDTH", "a list longer than the table's width", *too_narrow)
        if not lacks(trial, "decode_block_table"):
            table = dirty_table(draw, lists[0], num_blocks)
            got = ask(trial, "decode_block_table", table, 3, 4, num_blocks)
            right = decode_block_table(table, batch_size=3, num_heads=4, num_kv_blocks=num_blocks)
            if not np.array_equal(got, right):
                findings.append(wrong("the table is read as other blocks", "FORMAT-TABLE"))
    return findings


def block_lists(draw: Draw, num_blocks: int) -> BlockLists:
    """Lists of 2 heads and 2 block rows, the last of them with every block."""
    rows = [draw.subset(range(num_blocks), draw.integer(0, num_blocks)) for _ in range(3)]
    return BlockLists(*lists_to_csr([*rows, list(range(num_blocks))]))


def lists_as_grid(lists: BlockLists, num_blocks: int) -> BoolArray:
    """(2 heads, 2 block rows, num_blocks), True where listed."""
    return csr_to_dense(lists.indptr, lists.indices, num_blocks).reshape(2, 2, num_blocks)


def dirty_table(draw: Draw, lists: BlockLists, num_blocks: int) -> BlockTable:
    """A table of one batch entry and head, with the other blocks past the counts."""
    rows = [lists.of(row).tolist() for row in range(2)]
    padded = [[*row, *draw.shuffled([c for c in range(num_blocks) if c not in row])] for row in rows]
    return BlockTable(np.array([[[len(row) for row in rows]]]), np.array([[padded]]))


@checks("FORMAT-COVER", "FORMAT-MEMBERS")
def check_expansion(trial: Trial) -> list[Finding]:
    """Blocks are the least that hold the rows' tokens, each once, and bitmaps hold what each row lists."""
    if lacks(trial, "expand_to_blocks"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for i in range(NUM_DRAWS):
        # far enough apart to lie in several blocks, and in every part of a long one
        lists = [[t if t == HOLE else 9 * t for t in entries] for entries in drawn_lists(draw, holes=bool(i % 2))]
        block_size, q_block_size = draw.choice((1, 3, 4, 64, 65, 200)), draw.choice((1, 2, 4))
        got: BlockMembers = ask(trial, "expand_to_blocks", *lists_to_csr(lists), block_size, q_block_size)
        kept = [sorted({t for t in entries if t != HOLE}) for entries in lists]
        for first in range(0, len(lists), q_block_size):
            tokens = {t // block_size for row in kept[first : first + q_block_size] for t in row}
            loaded = got.of(first // q_block_size).tolist()
            if sorted(loaded) != sorted(tokens):
                findings.append(wrong(f"rows {first}.. load blocks {loaded}, not {sorted(tokens)}", "FORMAT-COVER"))
        if not findings and [sorted(row) for row in decode_members(got)] != kept:
            findings.append(wrong(f"bitmaps of {lists} hold other tokens", "FORMAT-MEMBERS"))
    return findings


@checks(
    "FORMAT-TASK-TABLE", "FORMAT-TASK-BALANCE", "FORMAT-TASK-SHORT", "FORMAT-TASK-EMPTY", "FORMAT-ROW-IDENTITY",
)  # fmt: skip
def check_tasks(trial: Trial) -> list[Finding]:
    """Tasks hold each entry of each row once, under the row's identity, in few and equal pieces."""
    if lacks(trial, "task_table"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        indptr, indices = lists_to_csr(drawn_lists(draw))
        row_ids = np.array(draw.shuffled(range(3 * len(indptr)))[: len(indptr) - 1])
        generations = np.array(draw.integers(len(row_ids), 0, 5))
        target = draw.choice((1, TARGET, 4))
        got: TaskTable = ask(trial, "task_table", indptr, target, row_ids, generations)
        wanted = build_task_table(indptr, target=target, row_ids=row_ids, generations=generations)
        findings += compare_tasks(got, wanted, indices)
    return findings[:MAX_LISTED]


def compare_tasks(got: TaskTable, wanted: TaskTable, indices: np.ndarray) -> list[Finding]:
    """What is wrong with the tasks of each row, in whatever order they stand."""
    strangers = sorted(set(got.row.tolist()) - set(wanted.row.tolist()))
    if strangers:
        return [wrong(f"a task names row {strangers[0]}, which does not exist", "FORMAT-ROW-IDENTITY")]
    findings = []
    ours, theirs = decode_task_table(wanted, indices), decode_task_table(got, indices)
    for row, entries in ours.items():
        lengths = (got.end - got.start)[got.row == row]
        pieces = int((wanted.row == row).sum())
        if not len(lengths):
            found = "FORMAT-TASK-TABLE" if entries else "FORMAT-TASK-EMPTY", "has no task"
        elif sorted(theirs[row]) != sorted(entries):
            found = "FORMAT-TASK-TABLE", f"has entries {theirs[row]}, not {entries}"
        elif theirs[row] != entries:
            found = "FORMAT-TASK-TABLE", "has its pieces under the wrong split numbers"
        elif len(entries) and not lengths.min():
            found = "FORMAT-TASK-EMPTY", "has a piece without entries"
        elif pieces == 1 and len(lengths) > 1:
            found = "FORMAT-TASK-SHORT", f"fits one task and has {len(lengths)}"
        elif len(lengths) != pieces or lengths.max() - lengths.min() > 1:
            found = "FORMAT-TASK-BALANCE", f"of {len(entries)} entries is cut into pieces of {lengths.tolist()}"
        else:
            continue
        related = ("FORMAT-ROW-IDENTITY",) if theirs.get(row) in ours.values() else ()
        findings.append(wrong(f"row {row} {found[1]}", *related, found[0]))
    return findings


@checks("FORMAT-GENERATION")
def check_late_tasks(trial: Trial) -> list[Finding]:
    """Tasks of a place that was given away may not write, and all others may."""
    if lacks(trial, "live_tasks"):
        return []
    draw = Draw(trial.case.seed)
    generations = np.array(draw.integers(6, 0, 5))
    table = build_task_table(np.arange(0, 42, 7)[: len(generations) + 1], target=TARGET, generations=generations[:5])
    now = generations.copy()
    now[[1, 3]] += (1, 2**16)  # which one and two bytes hold for the same number
    now[4] -= 1  # a number that wrapped around is as different as a later one
    table = table.take(np.array(draw.shuffled(range(len(table)))))
    got = ask(trial, "live_tasks", table, now)
    late = got & np.isin(table.row, (1, 3, 4))
    if late.any():
        return [
            wrong(f"a late task of row {int(table.row[late][0])} may write", "FORMAT-GENERATION", state="FAIL_race")
        ]
    if not got[~np.isin(table.row, (1, 3, 4))].all():
        return [wrong("a task of the present generation may not write", "FORMAT-GENERATION")]
    return []


@checks("FORMAT-TIER", "FORMAT-TIER-LIMIT", "FORMAT-TIER-OPTIMAL")
def check_tiers(trial: Trial) -> list[Finding]:
    """Rows run in the smallest tier that holds them; tiers called optimal cost least."""
    draw, findings = Draw(trial.case.seed), []
    if not lacks(trial, "choose_tier"):
        tiers = tuple(sorted({64, 128, 256, *draw.integers(2, 1, 200)}))
        for length in (0, 1, 64, 65, 128, 129, 255, 256, draw.integer(0, 256)):
            got, wanted = ask(trial, "choose_tier", length, tiers), smallest_tier(length, tiers)
            if got != wanted:
                findings.append(wrong(f"{length} entries run in tier {got}, not {wanted}, of {tiers}", "FORMAT-TIER"))
        what = "a row of 257 entries where the largest tier is 256"
        findings += check_refuses(trial, "FORMAT-TIER-LIMIT", what, "choose_tier", 257, tiers)
    if not lacks(trial, "optimal_tiers"):
        for price in (0.0, 1.0, 7.0, 500.0):
            findings += _optimum_findings(trial, draw.integers(draw.integer(1, 7), 0, 40), price)
    return findings


def _optimum_findings(trial: Trial, lengths: list[int], price: float) -> list[Finding]:
    def cost(capacity: int) -> float:
        return float(capacity + 5 * (capacity > 16))  # rises, with a step

    got = tuple(ask(trial, "optimal_tiers", lengths, cost, price))
    best = optimal_tiers(lengths, cost=cost, price=price)
    try:
        excess = tier_cost(lengths, got, cost=cost, price=price) - tier_cost(lengths, best, cost=cost, price=price)
    except RefusedInput as refusal:
        return [wrong(f"tiers {got} of lengths {lengths}: {refusal}", "FORMAT-TIER-OPTIMAL")]
    if excess <= Fraction(1, 10**9):
        return []
    return [wrong(f"tiers {got} of lengths {lengths} cost {float(excess)} more than {best}", "FORMAT-TIER-OPTIMAL")]
