"""Drawn structures with what a plain call lacks: quantized caches, dropout, rotation, epilogues, ranks and the rest.

Every feature is drawn onto a structure that may have any of the others, so that all pairs of them are met.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import combinations

import msgspec
from hypothesis import Phase, find, settings
from hypothesis import strategies as st

from attnconform.conformance.cases.sample_rules import DECAY, STRIPES
from attnconform.conformance.cases.strategies import SEEDS, structures
from attnconform.conformance.cases.structure import CandidateStructure, Case, QuantStructure, Structure, ValueKind
from attnconform.reference.candidates import HOLE
from attnconform.reference.dropout import Dropout
from attnconform.reference.epilogue import Activation, Cast, EpilogueStep, Gate
from attnconform.reference.rope import Rope
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

replace = msgspec.structs.replace


def head_pages(draw: st.DrawFn, structure: Structure) -> Structure:
    """Each KV head's part of each page wherever it likes, two parts of one head never in one place."""
    columns = [draw(st.permutations(range(structure.num_pages))) for _ in range(structure.num_kv_heads)]
    return replace(structure, head_pages=tuple(zip(*columns, strict=True)))


QUANTS = st.builds(
    QuantStructure,
    format=st.sampled_from(("int8", "float8_e4m3", "float8_e5m2")),
    granularity=st.sampled_from(("tensor", "head", "page", "token", "channel")),
    seed=SEEDS,
)


def k_quant(draw: st.DrawFn, structure: Structure) -> Structure:
    return replace(structure, k_quant=draw(QUANTS))


def v_quant(draw: st.DrawFn, structure: Structure) -> Structure:
    return replace(structure, v_quant=draw(QUANTS))


def dropout(draw: st.DrawFn, structure: Structure) -> Structure:
    rate = draw(st.sampled_from((0.0, 0.1, 0.5, 0.75, 0.99)))
    return replace(structure, dropout=Dropout(rate, draw(SEEDS)))


def rope(draw: st.DrawFn, structure: Structure) -> Structure:
    """Raw keys, or encoded ones where every page stands at one logical place."""
    places: dict[int, set[int]] = {}
    for pages in structure.page_table:
        for place, page in enumerate(pages):
            places.setdefault(page, set()).add(place)
    is_moved = any(len(of_page) > 1 for of_page in places.values())
    half = draw(st.integers(1, structure.head_dim_qk // 2))
    return replace(
        structure,
        rope=Rope(
            theta=draw(st.sampled_from((10000.0, 500.0, 1.5))),
            rotary_dim=2 * half,
            interleaved=draw(st.booleans()),
            k_position="raw" if is_moved else draw(st.sampled_from(("raw", "raw", "encoded"))),
        ),
    )


def epilogue(draw: st.DrawFn, structure: Structure) -> Structure:
    gate = st.tuples(*[st.integers(-8, 8).map(lambda quarters: quarters / 4)] * structure.num_qo_heads).map(Gate)
    activation = st.sampled_from(("relu", "silu")).map(Activation)
    cast = st.sampled_from(("float32", "bfloat16", "float16")).map(Cast)
    steps: st.SearchStrategy[list[EpilogueStep]] = st.lists(gate | activation | cast, min_size=1, max_size=3)
    return replace(structure, epilogue=tuple(draw(steps)))


def sequence(draw: st.DrawFn, structure: Structure) -> Structure:
    """Ranked lists in place of a structure's own, shared as those were."""
    old = structure.candidates or CandidateStructure(lists=(), sharing="kv_head")
    heads = {"query_head": structure.num_qo_heads, "kv_head": structure.num_kv_heads, "shared": 1}[old.sharing]
    lists: list[tuple[int, ...]] = []
    for rows, seqlen_kv in zip(structure.seqlens_q, structure.seqlens_kv, strict=True):
        keys = st.lists(st.integers(0, seqlen_kv - 1), unique=True, max_size=6) if seqlen_kv else st.just([])
        for _ in range(-(-rows // old.q_block_size) * heads):
            entries = draw(keys)
            at = draw(st.integers(0, len(entries)))
            lists.append((*entries[:at], *[HOLE] * draw(st.integers(0, 2)), *entries[at:]))
    longest = max(map(len, lists), default=0) + draw(st.integers(0, 2))
    bias = draw(st.lists(st.integers(-6, 6), min_size=longest, max_size=longest))
    return replace(
        structure,
        candidates=CandidateStructure(
            lists=tuple(lists),
            sharing=old.sharing,
            q_block_size=old.q_block_size,
            form="sequence",
            rank_bias=tuple(quarters / 4 for quarters in bias),
        ),
    )


def relative_bias(draw: st.DrawFn, structure: Structure) -> Structure:
    reach = draw(st.integers(0, 3))
    table = st.tuples(*[st.integers(-8, 8).map(lambda quarters: quarters / 4)] * (2 * reach + 1))
    tables = draw(st.tuples(*[table] * structure.num_qo_heads))
    return with_score(draw, structure, RelativeBias(tables))


def custom_score(draw: st.DrawFn, structure: Structure) -> Structure:
    return with_score(draw, structure, CustomScore(DECAY))


def with_score(draw: st.DrawFn, structure: Structure, rule: ScoreRule) -> Structure:
    """One more score rule, before, between or after the others."""
    at = draw(st.integers(0, len(structure.score_rules)))
    return replace(structure, score_rules=(*structure.score_rules[:at], rule, *structure.score_rules[at:]))


def head_window(draw: st.DrawFn, structure: Structure) -> Structure:
    limits = st.tuples(*[st.none() | st.integers(0, 5)] * structure.num_qo_heads)
    return with_mask(draw, structure, HeadWindow(draw(limits), draw(limits)))


def custom_mask(draw: st.DrawFn, structure: Structure) -> Structure:
    return with_mask(draw, structure, CustomMask(STRIPES))


def with_mask(draw: st.DrawFn, structure: Structure, rule: MaskRule) -> Structure:
    """A mask rule alone, or composed with the one that is there."""
    if structure.mask_rule is None:
        return replace(structure, mask_rule=rule)
    pair = (rule, structure.mask_rule) if draw(st.booleans()) else (structure.mask_rule, rule)
    return replace(structure, mask_rule=And(pair) if draw(st.booleans()) else Or(pair))


FEATURES: dict[str, Callable[[st.DrawFn, Structure], Structure]] = {
    function.__name__: function
    for function in (
        head_pages,
        k_quant,
        v_quant,
        dropout,
        rope,
        epilogue,
        sequence,
        relative_bias,
        custom_score,
        head_window,
        custom_mask,
    )
}


@st.composite
def with_features(
    draw: st.DrawFn,
    base: st.SearchStrategy[Structure],
    *,
    features: Collection[str] = tuple(FEATURES),
    always: Collection[str] = (),
) -> Structure:
    """Structures with about half of the features, and those that are always wanted."""
    structure = draw(base, label="structure")
    for name in features:
        if name in always or draw(st.booleans(), label=name):
            structure = FEATURES[name](draw, structure)
    return structure


# lengths lie at 0, 1, 2, and at the edges of pages and blocks
SMALL = structures(
    max_tokens=20,
    max_requests=2,
    max_rows=2,
    heads=((1, 1), (4, 2), (3, 3)),
    head_dims=((6, 3), (4, 4)),
    page_sizes=(1, 4, 8),
    lowest_q_idx=-3,
)


@st.composite
def featured_cases(
    draw: st.DrawFn,
    of: st.SearchStrategy[Structure],
    *,
    values: Sequence[ValueKind] = ("normal",),
) -> Case:
    """Cases of drawn structures; what clauses they exercise is no question of these tests."""
    return Case(
        id="drawn",
        level="L3",
        operation="forward",
        structure=draw(of, label="structure"),
        values=draw(st.sampled_from(values), label="values"),
        seed=draw(SEEDS, label="seed"),
        clauses=(),
    )


def features_of(structure: Structure) -> set[str]:
    """Which features a structure has, its older ones included."""
    has = {
        "head_pages": structure.head_pages is not None,
        "k_quant": structure.k_quant is not None,
        "v_quant": structure.v_quant is not None,
        "dropout": structure.dropout is not None,
        "rope": structure.rope is not None and structure.rope.turns,
        "epilogue": bool(structure.epilogue),
        "sequence": structure.candidates is not None and structure.candidates.form == "sequence",
        "sinks": structure.sink_logits is not None,
        "lists": structure.candidates is not None and structure.candidates.form == "set",
    }
    rules = {type(rule).__name__ for rule in (*structure.score_rules, *leaves(structure.mask_rule))}
    return {name for name, present in has.items() if present} | rules


def leaves(rule: MaskRule | None) -> list[MaskRule]:
    """The rules that a composition is made of."""
    match rule:
        case None:
            return []
        case And(rules) | Or(rules):
            return [leaf for part in rules for leaf in leaves(part)]
        case _:
            return [rule]


RULES = (Alibi, RelativeBias, SoftCap, CustomScore, Causal, Window, HeadWindow, PrefixLM, Document, CustomMask)
STORED = ("head_pages", "k_quant", "v_quant", "dropout", "rope", "epilogue", "sequence", "sinks", "lists")
ALL = frozenset({*STORED, *(rule.__name__ for rule in RULES)})


def all_pairs(features: Collection[str] = ALL) -> set[frozenset[str]]:
    """Every two features that one structure can have together."""
    pairs = {frozenset(pair) for pair in combinations(sorted(features), 2)}
    return pairs - {frozenset(("sequence", "lists"))}


def pairs_of(structure: Structure) -> set[frozenset[str]]:
    """Every two features that a structure has."""
    return {frozenset(pair) for pair in combinations(sorted(features_of(structure)), 2)}


def case_with(pair: frozenset[str], drawn: st.SearchStrategy[Case]) -> Case:
    """A drawn case that has both features."""
    drawn_only = settings(max_examples=5000, phases=[Phase.generate], database=None, derandomize=True)
    return find(drawn, lambda case: pair in pairs_of(case.structure), settings=drawn_only)
