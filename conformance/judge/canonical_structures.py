"""Candidates that a backend makes of lists, branches and groups of heads, against the reference's, item by item."""

from dataclasses import replace

import numpy as np

from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.block_structures import NUM_DRAWS
from attnconform.conformance.judge.offering import ask, check_refuses, lacks, wrong
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.verdict import Finding
from attnconform.reference.branches import Branch, BranchPolicy, gate_branches, merge_branches
from attnconform.reference.candidates import HOLE
from attnconform.reference.canonical import CanonicalRow, RequestPages, canonical_row
from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.group_merge import GROUP_POLICIES, GroupLists, GroupPolicy
from attnconform.reference.scored_list import ScoredList

NUM_PAGES = 24
NONE: IntArray = np.empty(0, dtype=np.int64)
EMPTY_BRANCH = Branch(NONE, np.empty(0), np.empty(0))
BRANCH_CLAUSES: dict[BranchPolicy, str] = {
    "cover": "SET-BRANCH-COVER",
    "keep_larger_score": "SET-BRANCH-LARGER",
    "accumulate_gates": "SET-BRANCH-GATES",
}
GROUP_CLAUSES: dict[GroupPolicy, str] = {
    "max": "GQA-MERGE-MAX",
    "sum": "GQA-MERGE-SUM",
    "private": "GQA-MERGE-PRIVATE",
}
QUARTER = 0.25  # scores and gates are multiples, so that sums are exact in any order and in float32
FINE = 2.0**-12  # between scores that bfloat16 and float16 do not tell apart
STEPS = (1, 70_001)  # from position to position: near, and past 16 bits
TOLERANCE = 1e-5  # of a few float32 operations; another function is farther away


def drawn_request(draw: Draw) -> RequestPages:
    """A request whose last page is not full, with pages of its own all over the pool."""
    page_size = draw.choice((2, 3, 4, 8))
    num_needed = draw.integer(2, 5)
    seqlen_kv = (num_needed - 1) * page_size + draw.integer(1, page_size - 1)
    pages = draw.shuffled(range(NUM_PAGES))
    owned = np.isin(np.arange(NUM_PAGES), pages[:num_needed])
    table = np.array(pages[: num_needed + 1])  # the entry past the last needed page is another request's
    return RequestPages(
        seqlen_kv=seqlen_kv, page_table_row=table, page_size=page_size, num_pages=NUM_PAGES, owned=owned
    )


@checks("SET-CANONICAL")
def check_canonical_rows(trial: Trial) -> list[Finding]:
    """A list becomes its triples: each position once, none past the end, each with its own page, offset and slot."""
    if lacks(trial, "canonical_row"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        request = drawn_request(draw)
        last = request.seqlen_kv - 1
        dynamic = np.array(draw.shuffled([*draw.integers(6, 0, last), *draw.integers(2, 0, last), HOLE, HOLE]))
        window = np.arange(max(0, last - 2), last + draw.integer(1, 3))  # may run past the end
        sinks = np.arange(draw.choice((0, 1, 3, request.seqlen_kv + 2)))
        last_visible = draw.choice((None, last))
        got: CanonicalRow = ask(trial, "canonical_row", dynamic, window, sinks, request, last_visible)
        wanted = canonical_row(dynamic, window, sinks, request, last_visible=last_visible)
        lengths = {len(got.positions), len(got.slots), len(got.where.page), len(got.where.offset)}
        if len(lengths) > 1:
            findings.append(wrong(f"triples of arrays of lengths {sorted(lengths)}", "SET-CANONICAL"))
            continue
        differs = first_difference(sorted(got.triples()), wanted.triples())
        if differs:
            findings.append(wrong(f"{dynamic.tolist()} of {request.seqlen_kv} tokens: {differs}", "SET-CANONICAL"))
    return findings


def first_difference(
    got: list[tuple[int, tuple[int, int], int]], wanted: list[tuple[int, tuple[int, int], int]]
) -> str:
    """What is wrong with the first triple that is not as it should be; empty where all are right."""
    positions, right = [t for t, _, _ in got], [t for t, _, _ in wanted]
    if positions != right:
        return f"positions are {positions}, not {right}"
    return next((f"entry {a} should be {b}" for a, b in zip(got, wanted, strict=True) if a != b), "")


@checks("SET-VALIDATE")
def check_validation(trial: Trial) -> list[Finding]:
    """A list that leads out of its request, into another's pages or past its declared end is refused."""
    if lacks(trial, "canonical_row"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        request = drawn_request(draw)
        last = request.seqlen_kv - 1
        assert request.owned is not None
        sound = draw.integers(2, 0, last)
        foreign = replace(request, owned=request.owned & (np.arange(NUM_PAGES) != request.page_table_row[0]))
        outside = replace(request, num_pages=int(request.page_table_row[:-1].max()), owned=None)
        everything = np.arange(last + 1)
        for what, listed, pages, last_visible in (
            ("a token that is not committed yet", [*sound, last + 1], request, None),
            ("a negative entry that is no hole", [*sound, -2], request, None),
            ("a page of another request", [*sound, 0], foreign, None),
            ("a page outside the pool", everything, outside, None),
            ("an entry past the list's declared end", [0, last], request, last - 1),
        ):
            arguments = (np.array(listed), NONE, NONE, pages, last_visible)
            findings += check_refuses(trial, "SET-VALIDATE", what, "canonical_row", *arguments)
    return findings


@checks("SET-BRANCH-COVER", "SET-BRANCH-LARGER", "SET-BRANCH-GATES")
def check_branches(trial: Trial) -> list[Finding]:
    """Each policy makes of several branches what it says, and none takes a branch with two scores of one position."""
    if lacks(trial, "merge_branches"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        step, count = draw.choice(STEPS), draw.choice((2, 3, 4, 9))
        branches = draw.shuffled([EMPTY_BRANCH, *(drawn_branch(draw, step) for _ in range(count))])
        for policy, clause in BRANCH_CLAUSES.items():
            got: Branch = ask(trial, "merge_branches", branches, policy)
            wanted = merge_branches(branches, policy)
            if len({len(array) for array in vars(got).values()}) > 1:
                findings.append(wrong(f"{policy} gives positions, scores and gates of other lengths", clause))
            elif entries_of(got) != entries_of(wanted):
                findings.append(wrong(f"{policy} gives {entries_of(got)}, not {entries_of(wanted)}", clause))
            twice = Branch(np.array([3, 3]), np.array([0.5, 0.25]), np.ones(2))
            what = "a branch that names position 3 twice"
            findings += check_refuses(trial, clause, what, "merge_branches", [*branches, twice], policy)
    return findings


def drawn_branch(draw: Draw, step: int) -> Branch:
    """Some of eight positions in any order, so that branches overlap, with equal scores among them."""
    positions = [step * i for i in draw.shuffled([0, *draw.subset(range(1, 8), draw.integer(2, 6))])]
    scores = QUARTER * np.array(draw.integers(len(positions), -4, 4))
    gates = QUARTER * np.array(draw.integers(len(positions), 1, 8))
    return Branch(np.array(positions), scores, gates)


def entries_of(branch: Branch) -> list[tuple[int, float, float]]:
    """(position, score, gate) in the order of positions."""
    return sorted(zip(*(a.tolist() for a in (branch.positions, branch.scores, branch.gates)), strict=True))


@checks("SET-BRANCH-SOFTMAX")
def check_gates(trial: Trial) -> list[Finding]:
    """Gated branches are a softmax each: overlapping lists, an empty one, gates that do not add up to 1."""
    if lacks(trial, "gate_branches"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        lists = [np.array([0, 1, 2]), np.array(draw.shuffled(range(1, 8))[:4]), np.array([1, 5]), NONE]
        gates: FloatArray = QUARTER * np.array(draw.integers(len(lists), 1, 8))
        scores, v = QUARTER * np.array(draw.integers(8, -8, 8)), np.array(draw.integers(16, 1, 9)).reshape(8, 2) * 1.0
        got, wanted = ask(trial, "gate_branches", lists, gates, scores, v), gate_branches(lists, gates, scores, v)
        if np.shape(got) != wanted.shape or not np.allclose(got, wanted, rtol=TOLERANCE, atol=0):
            message = f"branches gated by {gates.tolist()} give {np.asarray(got).tolist()}, not {wanted.tolist()}"
            findings.append(wrong(message, "SET-BRANCH-SOFTMAX", state="FAIL_value"))
    return findings


@checks("GQA-MERGE-MAX", "GQA-MERGE-SUM", "GQA-MERGE-PRIVATE", "GQA-MERGE-TIE")
def check_group_merges(trial: Trial) -> list[Finding]:
    """A group's wishes become the lists that the policy says, ties included."""
    if lacks(trial, "merge_group"):
        return []
    draw, findings = Draw(trial.case.seed), []
    for _ in range(NUM_DRAWS):
        step, count = draw.choice(STEPS), draw.choice((2, 3, 4, 8))
        heads = [drawn_scores(draw, step) for _ in range(count)]
        if draw.integer(0, 1):  # a head that wants nothing
            heads = draw.shuffled([ScoredList(NONE, np.empty(0)), *heads])
        budget = draw.integer(1, 6)
        for policy, clause in GROUP_CLAUSES.items():
            got: GroupLists = ask(trial, "merge_group", heads, policy, budget)
            findings += compare_groups(got, GROUP_POLICIES[policy](heads, budget=budget), heads, policy, clause)
        negative = [ScoredList(np.array([4]), np.array([-QUARTER])), *heads]
        findings += check_refuses(trial, "GQA-MERGE-SUM", "a negative score", "merge_group", negative, "sum", budget)
    return findings


def drawn_scores(draw: Draw, step: int) -> ScoredList:
    """Some of twelve positions in any order, several of equal score, and some of nearly equal ones."""
    positions = draw.shuffled(draw.subset(range(12), draw.integer(3, 9)))
    fine = draw.choice((0.0, FINE)) * np.array(draw.integers(len(positions), 0, 3))
    return ScoredList(step * np.array(positions), QUARTER * np.array(draw.integers(len(positions), 0, 4)) + fine)


def compare_groups(
    got: GroupLists, wanted: GroupLists, heads: list[ScoredList], policy: GroupPolicy, clause: str
) -> list[Finding]:
    """What a group loads or a head attends and should not, or the other way round."""
    pairs = [("the group loads", got.loaded, wanted.loaded)]
    if len(got.of_head) != len(heads):
        return [wrong(f"{policy}: {len(got.of_head)} lists for {len(heads)} heads", clause)]
    pairs += [(f"head {h} attends", a, b) for h, (a, b) in enumerate(zip(got.of_head, wanted.of_head, strict=True))]
    for what, ours, right in pairs:
        if sorted(np.asarray(ours).tolist()) != right.tolist():
            clauses = ("GQA-MERGE-TIE", clause) if is_a_tie(got, wanted, heads, policy) else (clause,)
            return [wrong(f"{policy}: {what} {np.asarray(ours).tolist()}, not {right.tolist()}", *clauses)]
    return []


def is_a_tie(got: GroupLists, wanted: GroupLists, heads: list[ScoredList], policy: GroupPolicy) -> bool:
    """Whether other positions of the very same scores were listed, and what is loaded is what is attended."""
    if {int(t) for listed in got.of_head for t in listed} != {int(t) for t in got.loaded}:
        return False
    for h, (ours, right) in enumerate(zip(got.of_head, wanted.of_head, strict=True)):
        said = [head_score(heads, h, policy, np.asarray(listed)) for listed in (ours, right)]
        if said[0] != said[1]:
            return False
    return True


def head_score(heads: list[ScoredList], h: int, policy: GroupPolicy, listed: IntArray) -> list[float]:
    """The scores, by a policy, of the positions in head h's list; sorted, -1 for one that nobody wants."""
    asked = [heads[h]] if policy == "private" else heads
    scores: list[float] = []
    for position in np.unique(listed).tolist():
        said = [float(head.scores[head.positions == position][0]) for head in asked if position in head.positions]
        scores.append((sum(said) if policy == "sum" else max(said)) if said else -1.0)
    return sorted(scores)
