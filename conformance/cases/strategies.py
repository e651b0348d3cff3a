"""Hypothesis strategies of structures and cases: valid by construction, so that nothing is drawn to be thrown away.

Hypothesis draws the structure; the numbers in the tensors come from one drawn 64-bit seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from hypothesis import strategies as st

from attnconform.conformance.cases.clauses_of import clauses_of
from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.generate import TILE_KV
from attnconform.conformance.cases.structure import (
    CandidateStructure,
    Case,
    Dtype,
    Operation,
    Structure,
    ValueKind,
    build_problem,
    named,
)
from attnconform.conformance.views import Hints
from attnconform.reference.candidates import HOLE, Sharing
from attnconform.reference.rules import (
    Alibi,
    And,
    Causal,
    CustomMask,
    CustomScore,
    Document,
    HeadWindow,
    MaskRule,
    Or,
    PrefixLM,
    RelativeBias,
    ScoreRule,
    SoftCap,
    Window,
)

HEADS = ((1, 1), (2, 2), (4, 2), (6, 2), (4, 1), (3, 3))
HEAD_DIMS = ((16, 16), (32, 32), (32, 16), (64, 64), (80, 80), (128, 128))
PAGE_SIZES = (1, 4, 8, 16, 32)
BLOCK_SIZES = (2, 4, 16)
SHARINGS: tuple[Sharing, ...] = get_args(Sharing)
VALUE_KINDS: tuple[ValueKind, ...] = get_args(ValueKind)
SEEDS = st.integers(0, 2**64 - 1)
# what the matrix calls a rule that stands alone, and a pair in this order
OF_THE_MATRIX = {
    "Causal": "causal", "Window": "window", "PrefixLM": "prefix", "Alibi": "alibi", "SoftCap": "softcap",
    "Alibi_SoftCap": "alibi_softcap",
}  # fmt: skip

CLAUSES_OF_RULE: dict[type[MaskRule | ScoreRule], tuple[str, ...]] = {
    Causal: ("MASK-CAUSAL",),
    Window: ("MASK-WINDOW",),
    PrefixLM: ("MASK-PREFIX",),
    Document: ("MASK-DOCUMENT",),
    And: ("MASK-COMPOSE",),
    Or: ("MASK-COMPOSE",),
    Alibi: ("SCORE-ALIBI", "SCORE-HEAD"),
    SoftCap: ("SCORE-SOFTCAP",),
    HeadWindow: ("MASK-HEAD-WINDOW",),
    CustomMask: ("RULE-CUSTOM",),
    RelativeBias: ("SCORE-RELATIVE", "SCORE-HEAD"),
    CustomScore: ("RULE-CUSTOM",),
}


@dataclass(frozen=True)
class Requests:
    """Query rows and committed tokens of every request, and where its queries sit."""

    seqlens_q: tuple[int, ...]
    seqlens_kv: tuple[int, ...]
    q_offset: tuple[int, ...] | None


@dataclass(frozen=True)
class Pages:
    """The page table of every request, the pool's size, and who may read which page."""

    table: tuple[tuple[int, ...], ...]
    num_pages: int
    owner: tuple[int, ...] | None


@st.composite
def structures(
    draw: st.DrawFn,
    *,
    max_tokens: int = 40,  # committed tokens of one request
    max_requests: int = 4,
    max_rows: int = 4,  # query rows of one request
    heads: Sequence[tuple[int, int]] = HEADS,  # query heads and KV heads
    head_dims: Sequence[tuple[int, int]] = HEAD_DIMS,  # of Q and K, and of V
    page_sizes: Sequence[int] = PAGE_SIZES,
    dtypes: Sequence[Dtype] = get_args(Dtype),
    lowest_q_idx: int = 0,  # below 0: queries before the first token too
) -> Structure:
    """Structures of small requests, with at least one query row."""
    page_size = draw(st.sampled_from(page_sizes), label="page_size")
    requests = draw(batches(page_size, max_tokens, max_requests, max_rows, lowest_q_idx), label="requests")
    pages = draw(page_tables(requests.seqlens_kv, page_size), label="pages")
    num_qo_heads, num_kv_heads = draw(st.sampled_from(heads), label="heads")
    head_dim_qk, head_dim_vo = draw(st.sampled_from(head_dims), label="head_dims")
    return Structure(
        dtype=draw(st.sampled_from(dtypes), label="dtype"),
        seqlens_q=requests.seqlens_q,
        seqlens_kv=requests.seqlens_kv,
        q_offset=requests.q_offset,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        page_size=page_size,
        num_pages=pages.num_pages,
        page_table=pages.table,
        page_owner=pages.owner,
        layout=draw(st.sampled_from(("NHD", "HND")), label="layout"),
        interleaved=draw(st.booleans(), label="interleaved"),
        candidates=draw(st.none() | candidate_lists(requests, num_qo_heads, num_kv_heads), label="candidates"),
        mask_rule=draw(mask_rules(requests.seqlens_kv), label="mask_rule"),
        score_rules=draw(score_rules(num_qo_heads), label="score_rules"),
        sm_scale=draw(st.sampled_from((head_dim_qk**-0.5, 1 / head_dim_qk)), label="sm_scale"),
        sink_logits=draw(st.none() | sink_logits(num_qo_heads), label="sink_logits"),
        hints=Hints(
            num_kv_splits=draw(st.sampled_from((None, 1, 2, 3, 8)), label="num_kv_splits"),
            tile_kv=draw(st.sampled_from((None, 16, TILE_KV)), label="tile_kv"),
        ),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    of: st.SearchStrategy[Structure] | None = None,  # None: structures()
    *,
    operations: Sequence[Operation] = ("forward", "backward"),
    values: Sequence[ValueKind] = VALUE_KINDS,
) -> Case:
    """Cases of drawn structures, tagged with what each exercises."""
    structure = draw(structures() if of is None else of, label="structure")
    operation = draw(st.sampled_from(operations), label="operation")
    kind = draw(st.sampled_from(values), label="values")
    case = Case(
        id="",
        level="L3",
        operation=operation,
        structure=structure,
        values=kind,
        seed=draw(SEEDS, label="seed"),
        clauses=clauses_of_structure(operation, structure, kind),
        axes=axes_of(structure, kind),
    )
    return named(case, "drawn")


def lengths(page_size: int, max_tokens: int) -> st.SearchStrategy[int]:
    """Committed tokens of one request; every second draw lies at an edge of a page or a tile."""
    near = {size * n + by for size in (page_size, TILE_KV) for n in (1, 2) for by in (-1, 0, 1)}
    edges = sorted(t for t in near | {0, 1, 2, max_tokens} if 0 <= t <= max_tokens)
    return st.sampled_from(edges) | st.integers(0, max_tokens)


@st.composite
def batches(
    draw: st.DrawFn, page_size: int, max_tokens: int, max_requests: int, max_rows: int, lowest_q_idx: int
) -> Requests:
    """Requests, at least one of which asks something."""
    kv = draw(st.lists(lengths(page_size, max_tokens), min_size=1, max_size=max_requests))
    if any(kv) and draw(st.booleans()):  # bottom-right: a query before the first token would have no position
        asking = draw(st.sampled_from([n for n, t in enumerate(kv) if t]))
        q = tuple(draw(st.integers(int(n == asking), min(max_rows, t))) for n, t in enumerate(kv))
        return Requests(q, tuple(kv), None)
    asking = draw(st.integers(0, len(kv) - 1))
    q = tuple(draw(st.integers(int(n == asking), max_rows)) for n in range(len(kv)))
    return Requests(q, tuple(kv), tuple(draw(st.integers(lowest_q_idx, t + 2)) for t in kv))


@st.composite
def page_tables(draw: st.DrawFn, seqlens_kv: tuple[int, ...], page_size: int) -> Pages:
    """Pages in any order, some of them named twice, in a pool that may hold pages nobody uses."""
    needed = [-(-t // page_size) for t in seqlens_kv]
    lowest = draw(st.sampled_from((0, 17)), label="unused pages below")
    num_pages = max(1, lowest + sum(needed) + draw(st.integers(0, 2), label="unused pages above"))
    ids = list(range(lowest, num_pages))
    order = draw(st.sampled_from(("ascending", "descending", "shuffled")), label="order")
    if order == "shuffled":
        ids = Draw(draw(SEEDS, label="order seed")).shuffled(ids)
    ids = ids[::-1] if order == "descending" else ids
    own = [ids[sum(needed[:n]) : sum(needed[: n + 1])] for n in range(len(needed))]
    table = draw(st.one_of(st.just(own), shared_prefixes(own), aliases(own)), label="page_table")
    owner = owners(table, num_pages) if draw(st.booleans(), label="owned") else None
    return Pages(tuple(tuple(row) for row in table), num_pages, owner)


@st.composite
def shared_prefixes(draw: st.DrawFn, own: list[list[int]]) -> list[list[int]]:
    """Tables in which every request starts with the first pages of the longest one, as far as it reaches."""
    donor = max(own, key=len)
    shared = donor[: draw(st.integers(0, len(donor)))]
    return [[*shared[: len(row)], *row[len(shared) :]] for row in own]


@st.composite
def aliases(draw: st.DrawFn, own: list[list[int]]) -> list[list[int]]:
    """Tables in which one request names one page at two logical places, where it has two. [SET-ALIAS]"""
    table = [list(row) for row in own]
    longest = max(table, key=len)
    if len(longest) > 1:
        later = draw(st.integers(1, len(longest) - 1))
        longest[later] = longest[draw(st.integers(0, later - 1))]
    return table


def owners(table: list[list[int]], num_pages: int) -> tuple[int, ...]:
    """The one request that uses a page, -1 where several do; unused pages go round the requests. [SAFE-OWNER]"""
    users = [{n for n, row in enumerate(table) if page in row} or {page % len(table)} for page in range(num_pages)]
    return tuple(-1 if len(of_page) > 1 else min(of_page) for of_page in users)


@st.composite
def candidate_lists(draw: st.DrawFn, requests: Requests, num_qo_heads: int, num_kv_heads: int) -> CandidateStructure:
    """Lists of every block of query rows and head, at token or block granularity."""
    block_size = draw(st.just(1) | st.sampled_from(BLOCK_SIZES), label="block_size")
    q_block_size = draw(st.sampled_from((1, 2, 4)), label="q_block_size")
    sharing = draw(st.sampled_from(SHARINGS), label="sharing")
    heads = {"query_head": num_qo_heads, "kv_head": num_kv_heads, "shared": 1}[sharing]
    lists: list[tuple[int, ...]] = []
    for rows, t in zip(requests.seqlens_q, requests.seqlens_kv, strict=True):
        count = -(-rows // q_block_size) * heads
        lists += draw(lists_of_request(-(-t // block_size), count), label="lists")
    return CandidateStructure(
        lists=tuple(lists),
        granularity="token" if block_size == 1 else "block",
        block_size=block_size,
        sharing=sharing,
        q_block_size=q_block_size,
        window=draw(st.sampled_from((0, 1, 3)), label="window"),
        num_sink_tokens=draw(st.sampled_from((0, 1, 2)), label="num_sink_tokens"),
    )


@st.composite
def lists_of_request(draw: st.DrawFn, num_ids: int, count: int) -> list[tuple[int, ...]]:
    """Lists over a few ids of one request: holes and repetitions anywhere, hot ids, the ragged last block."""
    liked: list[int] = []
    if num_ids:
        liked = [num_ids - 1, *draw(st.lists(st.integers(0, num_ids - 1), max_size=8), label="liked ids")]
    entries = st.lists(st.sampled_from((HOLE, *liked)), max_size=8).map(tuple)
    return [draw(entries) for _ in range(count)]


def mask_rules(seqlens_kv: tuple[int, ...]) -> st.SearchStrategy[MaskRule | None]:
    """No rule, every rule alone, and pairs, triples and nested pairs under `And` and `Or`."""
    leaf = single_mask_rules(seqlens_kv)
    pair, triple = st.tuples(leaf, leaf), st.tuples(leaf, leaf, leaf)
    nested_or, nested_and = st.tuples(leaf, st.builds(Or, pair)), st.tuples(leaf, st.builds(And, pair))
    return st.one_of(
        st.none(), leaf, st.builds(And, pair | triple | nested_or), st.builds(Or, pair | triple | nested_and)
    )


def single_mask_rules(seqlens_kv: tuple[int, ...]) -> st.SearchStrategy[MaskRule]:
    """Rules whose parameters cut inside the lengths."""
    prefix_len = st.tuples(*(st.integers(0, t) for t in seqlens_kv))
    starts = st.tuples(*(document_starts(t) for t in seqlens_kv))
    left, right = st.none() | st.integers(0, 6), st.none() | st.integers(0, 2)
    return st.one_of(
        st.just(Causal()), st.builds(Window, left, right), st.builds(PrefixLM, prefix_len), st.builds(Document, starts)
    )


def document_starts(seqlen_kv: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Ascending starts of up to four documents of one request."""
    cuts = st.lists(st.integers(1, seqlen_kv), max_size=3) if seqlen_kv else st.just([])
    return cuts.map(lambda drawn: tuple(sorted({0, *drawn})))


def score_rules(num_qo_heads: int) -> st.SearchStrategy[tuple[ScoreRule, ...]]:
    """ALiBi and soft cap: neither, each, and both in both orders."""
    slope = st.sampled_from((0.0, 0.0625, 0.25, 0.5, 1.0))
    alibi = st.tuples(*[slope] * num_qo_heads).map(Alibi)
    cap = st.sampled_from((1.5, 8.0, 50.0)).map(SoftCap)
    return st.one_of(st.just(()), st.tuples(alibi), st.tuples(cap), st.tuples(alibi, cap), st.tuples(cap, alibi))


def sink_logits(num_qo_heads: int) -> st.SearchStrategy[tuple[float, ...]]:
    """One sink logit a query head, in quarters."""
    return st.tuples(*[st.integers(-8, 12).map(lambda quarters: quarters / 4)] * num_qo_heads)


def axes_of(structure: Structure, kind: ValueKind) -> dict[str, str]:
    """The axis values of a drawn structure, as far as clauses and declarations depend on them.

    They are the matrix' own words where it has one, and names of rules where it has none.
    """
    lists = structure.candidates
    window, sinks = (0, 0) if lists is None else (lists.window, lists.num_sink_tokens)
    mask = "none" if structure.mask_rule is None else type(structure.mask_rule).__name__
    score = "_".join(type(rule).__name__ for rule in structure.score_rules) or "none"
    return {
        "dtype": structure.dtype,
        "heads": f"{structure.num_qo_heads}/{structure.num_kv_heads}",
        "head_dim": f"{structure.head_dim_qk}/{structure.head_dim_vo}",
        "page_size": str(structure.page_size),
        "sharing": "shared" if lists is None else lists.sharing,
        "q_block": "1" if lists is None else str(lists.q_block_size),
        "granularity": "dense" if lists is None else lists.granularity,
        "listing": listing_of(() if lists is None else lists.lists),
        "local": {(0, 0): "none", (1, 0): "window", (0, 1): "sinks"}.get(
            (int(window > 0), int(sinks > 0)), "window_and_sinks"
        ),
        "pages": pages_of(structure.page_table),
        "layout": structure.layout,
        "strides": "interleaved" if structure.interleaved else "dense",
        "mask": OF_THE_MATRIX.get(mask, mask),
        "score": OF_THE_MATRIX.get(score, score),
        "sink": "none" if structure.sink_logits is None else "logits",
        "splits": str(structure.hints.num_kv_splits or 1),
        "values": kind,
        "form": "set" if lists is None else lists.form,
        "quant": "none" if structure.k_quant is None and structure.v_quant is None else "drawn",
        "dropout": "none" if structure.dropout is None else "drawn",
        "rope": "none" if structure.rope is None else structure.rope.k_position,
        "epilogue": "none" if not structure.epilogue else "drawn",
        "head_pages": "none" if structure.head_pages is None else "apart",
    }


def listing_of(lists: tuple[tuple[int, ...], ...]) -> str:
    """What is unusual about how lists are written, holes before repetitions before order."""
    kept = [[i for i in entries if i != HOLE] for entries in lists]
    holes = any(HOLE in entries for entries in lists)
    repeats = any(len(set(entries)) < len(entries) for entries in kept)
    if holes or repeats:
        return "holes_and_duplicates" if holes and repeats else "holes" if holes else "duplicates"
    return "shuffled" if any(entries != sorted(entries) for entries in kept) else "sorted"


def pages_of(table: tuple[tuple[int, ...], ...]) -> str:
    """How pages are named: twice by one request, by several requests, or out of order."""
    if any(len(set(row)) < len(row) for row in table):
        return "aliased"
    named_pages = [page for row in table for page in row]
    if len(set(named_pages)) < len(named_pages):
        return "shared_prefix"
    return "contiguous" if named_pages == sorted(named_pages) else "shuffled"


def clauses_of_structure(operation: Operation, structure: Structure, kind: ValueKind) -> tuple[str, ...]:
    """The clauses a drawn case exercises: those of its axes, and those of each of its rules."""
    by_axes = clauses_of(operation, axes_of(structure, kind), build_problem(structure))
    mask, score = rules_within(structure.mask_rule), structure.score_rules
    by_rule = [clause for rule in (*mask, *score) for clause in CLAUSES_OF_RULE[type(rule)]]
    by_rule += ["MASK-NO-BIAS"] if mask else []
    by_rule += ["SCORE-ORDER"] if len(score) > 1 else []
    if operation == "backward" and any(isinstance(rule, SoftCap) for rule in score):
        by_rule.append("GRAD-SOFTCAP")
    return tuple(sorted({*by_axes, *by_rule}))


def rules_within(rule: MaskRule | None) -> list[MaskRule]:
    """A rule and every rule it is composed of."""
    if rule is None:
        return []
    parts = rule.rules if isinstance(rule, And | Or) else ()
    return [rule, *(inner for part in parts for inner in rules_within(part))]
