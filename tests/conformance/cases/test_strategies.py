"""Drawn structures and cases: always valid, of every kind, and drawn without throwing anything away."""

import ast
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Capabilities, OneOf
from attnconform.conformance.cases import profiles, strategies
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.strategies import VALUE_KINDS, cases, pages_of, rules_within, structures
from attnconform.conformance.cases.structure import Case, Structure, build_problem, decode_case, encode_case
from attnconform.conformance.cases.values import build_values, round_to
from attnconform.conformance.judge.judge import undeclared
from attnconform.reference.attention import attention, attention_gradients, effective_sets
from attnconform.reference.problem import check_problem
from attnconform.reference.rules import Causal

profiles.load_profile()


@settings(max_examples=profiles.examples(150))
@given(structures())
def test_a_drawn_structure_is_never_refused_and_asks_something(structure: Structure) -> None:
    problem = build_problem(structure)
    check_problem(problem)
    assert problem.total_q >= 1


@settings(max_examples=profiles.examples(50))
@given(st.data(), st.integers(0, 100), st.integers(1, 5), st.integers(1, 7), st.integers(-4, 0))
def test_drawn_structures_stay_inside_the_limits_asked_for(
    data: st.DataObject, max_tokens: int, max_requests: int, max_rows: int, lowest: int
) -> None:
    of = structures(
        max_tokens=max_tokens,
        max_requests=max_requests,
        max_rows=max_rows,
        heads=((8, 4),),
        head_dims=((24, 12),),
        page_sizes=(2, 64),
        dtypes=("float16",),
        lowest_q_idx=lowest,
    )
    structure = data.draw(of)
    check_problem(build_problem(structure))
    assert max(structure.seqlens_kv) <= max_tokens
    assert 1 <= len(structure.seqlens_kv) <= max_requests
    assert max(structure.seqlens_q) <= max_rows
    assert (structure.num_qo_heads, structure.num_kv_heads) == (8, 4)
    assert (structure.head_dim_qk, structure.head_dim_vo, structure.dtype) == (24, 12, "float16")
    assert structure.page_size in (2, 64)
    assert all(where.q_idx >= lowest for where in build_problem(structure).rows())


@settings(max_examples=profiles.examples(60))
@given(cases())
def test_a_drawn_case_runs_forward_and_backward_and_survives_json(case: Case) -> None:
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    assert np.isfinite(attention(problem, values.q, values.k, values.v).out).all()
    gradients = attention_gradients(problem, values.q, values.k, values.v, values.dout, values.dlse)
    assert all(np.isfinite(x).all() for x in (gradients.dq, gradients.dk, gradients.dv))
    assert decode_case(encode_case(case), "drawn") == case
    for tensor in (values.q, values.k, values.v, values.dout):
        np.testing.assert_array_equal(round_to(tensor, case.structure.dtype), tensor)


def features_of(case: Case) -> set[str]:
    """What a case has of everything that strategies promise to reach."""
    structure, found = case.structure, set(case.axes.values()) | {case.operation, case.structure.dtype}
    found |= {f"{case.axes['splits']} splits"}
    found |= {f"requests {len(structure.seqlens_kv)}", f"pages of {structure.page_size}"}
    found |= {"no tokens"} if 0 in structure.seqlens_kv else set()
    found |= {"no rows"} if 0 in structure.seqlens_q else set()
    found |= {
        f"page edge {by:+}"
        for t in structure.seqlens_kv
        for by in (-1, 0, 1)
        if t > 1 and (t - by) % structure.page_size == 0
    }
    found |= {f"tile edge {by:+}" for t in structure.seqlens_kv for by in (-1, 0, 1) if t - by == 32}
    found |= {"offset"} if structure.q_offset is not None else {"bottom-right"}
    found |= {"owned"} if structure.page_owner is not None else set()
    found |= rule_features(structure) | list_features(structure)
    counts = effective_sets(build_problem(structure)).counts()
    found |= {"empty row beside a full one"} if not counts.all() and counts.any() else set()
    return found


def rule_features(structure: Structure) -> set[str]:
    names = [type(rule).__name__ for rule in rules_within(structure.mask_rule)]
    depth = f"{names[0]} of {len(names) - 1}" if len(names) > 1 else "alone"
    nested = {f"{names[0]} over {name}" for name in names[2:] if name in ("And", "Or")}
    return {*names, depth, *nested}


def list_features(structure: Structure) -> set[str]:
    lists = structure.candidates
    if lists is None:
        return set()
    found = {lists.sharing, f"query blocks of {lists.q_block_size}"}
    for entries in lists.lists:
        inside = "".join("." if i == -1 else "x" for i in entries)
        found |= {"hole before an entry"} if ".x" in inside else set()
        found |= {"hole between entries"} if "x" in inside and "." in inside.strip(".") else set()
        found |= {"only holes"} if inside and "x" not in inside else set()
        found |= {"no entries"} if not inside else set()
    return found


PROMISED = (
    {"forward", "backward", "float32", "bfloat16", "float16", "NHD", "HND", "dense", "interleaved", "token", "block"}
    | {f"requests {n}" for n in (1, 2, 3, 4)}
    | {f"pages of {size}" for size in strategies.PAGE_SIZES}
    | {f"{edge} edge {by}" for edge in ("page", "tile") for by in ("-1", "+0", "+1")}
    | {"no tokens", "no rows", "offset", "bottom-right", "owned", "empty row beside a full one"}
    | {"contiguous", "shuffled", "shared_prefix", "aliased"}
    | {"query_head", "kv_head", "shared", "query blocks of 1", "query blocks of 2", "query blocks of 4"}
    | {"hole before an entry", "hole between entries", "only holes", "no entries"}
    | {"duplicates", "holes", "holes_and_duplicates", "window", "sinks", "window_and_sinks"}
    | {"Causal", "Window", "PrefixLM", "Document", "And", "Or", "alone"}
    | {"And of 2", "And of 3", "Or of 2", "Or of 3", "And over Or", "Or over And"}
    | {"none", "alibi", "softcap", "alibi_softcap", "SoftCap_Alibi", "logits"}
    | {f"{n} splits" for n in (1, 2, 3, 8)}
    | set(VALUE_KINDS)
)


def test_every_promised_feature_is_drawn() -> None:
    """Most within a few hundred cases; which ones depends on what else is imported, so the rest is looked for."""
    met: Counter[str] = Counter()

    @settings(max_examples=profiles.examples(400))
    @given(cases())
    def draw(case: Case) -> None:
        met.update(features_of(case))

    draw()
    rare = PROMISED - met.keys()
    assert len(rare) <= len(PROMISED) // 10
    for feature in rare:
        assert feature in features_of(case_with(feature))


def case_with(feature: str, *, tries: int = 3000) -> Case:
    """A drawn case that has a feature. Raises NoSuchExample where so many have not."""
    drawn_only = settings(max_examples=tries, phases=[Phase.generate], database=None)
    return find(cases(), lambda case: feature in features_of(case), settings=drawn_only)


def test_a_feature_that_is_never_drawn_is_not_found() -> None:
    with pytest.raises(NoSuchExample):
        case_with("pages of 5", tries=20)


def test_every_clause_a_drawn_case_names_is_one_the_matrix_names() -> None:
    known = {clause for case in matrix("L1") for clause in case.clauses}

    @settings(max_examples=profiles.examples(50))
    @given(cases())
    def check(case: Case) -> None:
        assert set(case.clauses) <= known

    check()


def test_derandomized_draws_are_the_same_every_time() -> None:
    def ids() -> list[str]:
        drawn: list[str] = []

        @settings(max_examples=25, derandomize=True, database=None)
        @given(cases())
        def draw(case: Case) -> None:
            drawn.append(case.id)

        draw()
        return drawn

    first = ids()
    assert len(set(first)) > 15
    assert ids() == first


def test_seeds_span_64_bits() -> None:
    top = 2**64 - 1
    assert find(strategies.SEEDS, lambda seed: seed == top, settings=settings(max_examples=2000)) == top
    assert find(strategies.SEEDS, lambda seed: True) == 0


def test_nothing_is_drawn_to_be_thrown_away() -> None:
    tree = ast.parse(Path(strategies.__file__).read_text())
    words = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    words |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not words & {"filter", "assume", "reject", "unique_by", "sets"}


def test_pages_are_called_aliased_only_where_one_request_names_a_page_twice() -> None:
    assert pages_of(((3, 1), (2,))) == "shuffled"
    assert pages_of(((1, 2), (3,))) == "contiguous"
    assert pages_of(((1, 2), (1,))) == "shared_prefix"
    assert pages_of(((1, 1), (2,))) == "aliased"


@settings(max_examples=profiles.examples(50))
@given(cases())
def test_a_drawn_case_says_on_its_axes_what_a_backend_may_leave_out(case: Case) -> None:
    structure, axes = case.structure, case.axes
    assert axes["heads"] == f"{structure.num_qo_heads}/{structure.num_kv_heads}"
    assert axes["head_dim"] == f"{structure.head_dim_qk}/{structure.head_dim_vo}"
    assert (axes["dtype"], axes["page_size"]) == (structure.dtype, str(structure.page_size))
    narrow = Capabilities(supported={"page_size": OneOf(("16",)), "mask": OneOf(("none", "causal"))})
    backend = StepsBackend()
    backend.capabilities = narrow  # type: ignore[misc]  # of this one instance
    is_plain = structure.mask_rule is None or structure.mask_rule == Causal()
    is_outside = structure.page_size != 16 or not is_plain or structure.page_owner is not None
    assert (undeclared(case, backend) is not None) == is_outside
