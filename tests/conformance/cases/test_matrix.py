"""The L1 matrix: large enough, covering, permanent, and every case what its axes and clauses say."""

import hashlib
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from attnconform.conformance.backend import OPTIONAL_AXES
from attnconform.conformance.cases.axes import DENSE, is_possible
from attnconform.conformance.cases.covering import AXES, TRIPLES, arrays, balanced, covering_rows, make_rows, uncovered
from attnconform.conformance.cases.matrix import frozen_rows, matrix, smoke_cases
from attnconform.conformance.cases.refusals import REFUSALS, refusal_cases
from attnconform.conformance.cases.structure import Case, build_problem, case_digest, decode_case, encode_case
from attnconform.conformance.cases.values import build_values
from attnconform.reference.attention import attention, check_tensors, effective_sets
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import check_problem

# sha256 of the sorted ids, one a line. An id is permanent: whoever changes this changes what reports and
# expectations of every user refer to, and says so in the changelog.
IDS_DIGEST = "42d9ae1f691056e571afd761382ad419d492e684657f5fd56c85c128028b5b2b"
OPERATIONS = tuple(AXES)


def sound_cases() -> list[Case]:
    return [case for case in matrix("L1") if case.refuses is None]


def test_the_matrix_has_at_least_150_cases_of_forward_and_backward() -> None:
    assert len(sound_cases()) >= 150
    assert {case.operation for case in matrix("L1")} == {"forward", "backward", "refusal", "structure"}


def test_ids_are_unique_and_frozen() -> None:
    every = [case.id for case in matrix("L1")]
    assert len(set(every)) == len(every)
    ids = sorted(case_id for case_id in every if ".designed-" not in case_id)  # those are frozen beside their tests
    assert hashlib.sha256("\n".join(ids).encode()).hexdigest() == IDS_DIGEST


def test_an_id_names_level_operation_and_content() -> None:
    for case in matrix("L1"):
        level, operation, slug, digest = case.id.split(".")
        assert (level, operation, digest) == (case.level, case.operation, case_digest(case))
        assert slug
        assert case.level in ("L0", "L1")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_frozen_array_holds_every_possible_pair_and_every_stated_triple(operation: str) -> None:
    assert uncovered(operation, frozen_rows(operation)) == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fresh_covering_array_leaves_nothing_uncovered(operation: str) -> None:
    rows = covering_rows(operation)
    assert uncovered(operation, rows) == []
    assert all(is_possible(row) for row in rows)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_missing_row_is_noticed(operation: str) -> None:
    rows = frozen_rows(operation)
    for value in AXES[operation]["dtype"]:
        missing = uncovered(operation, [row for row in rows if row["dtype"] != value])
        assert missing
        assert all(row.get("dtype", value) == value for row in missing)
    triple = {axis: rows[0][axis] for axis in TRIPLES[operation][0]}
    without = [row for row in rows if not triple.items() <= row.items()]
    assert triple in uncovered(operation, without)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_value_of_a_core_axis_crowds_out_the_others(operation: str) -> None:
    core = next(arrays(operation))
    rows = frozen_rows(operation)
    for axis in ("dtype", "heads", "head_dim", "page_size", "layout", "strides", "splits", "mask", "score"):
        counts = [sum(row[axis] == value for row in rows) for value in core.axes[axis]]
        assert max(counts) <= 2 * min(counts), (axis, counts)


def test_balancing_keeps_what_is_covered() -> None:
    core = next(arrays("backward"))
    rows = make_rows(core)
    wanted = list(core.wanted())
    for given in (rows, balanced(core, rows)):
        assert all(any(w.items() <= row.items() for row in given) for w in wanted)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_feature_meets_every_core_value_with_the_other_features_off(operation: str) -> None:
    rows = frozen_rows(operation)
    for axis, off in OPTIONAL_AXES.items():
        alone = [
            row for row in rows if row[axis] != off and all(row[a] == o for a, o in OPTIONAL_AXES.items() if a != axis)
        ]
        assert {row["dtype"] for row in alone} == set(AXES[operation]["dtype"]), axis


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_frozen_row_is_possible_and_has_a_value_of_every_axis(operation: str) -> None:
    for row in frozen_rows(operation):
        assert row.keys() == AXES[operation].keys()
        assert all(row[axis] in values for axis, values in AXES[operation].items())
        assert is_possible(row)
        assert row["granularity"] != "dense" or DENSE.items() <= row.items()


def test_every_sound_case_is_accepted_and_has_finite_results_for_finite_inputs() -> None:
    for case in sound_cases():
        problem = build_problem(case.structure)
        check_problem(problem)
        values = build_values(case, problem)
        result = attention(problem, values.q, values.k, values.v)
        assert np.isfinite(result.out).all(), case.id
        empty = effective_sets(problem).counts() == 0
        assert np.array_equal(np.isneginf(result.lse), empty & (problem.sink_logits is None)), case.id
        assert np.isfinite(result.lse[~np.isneginf(result.lse)]).all(), case.id


def test_every_case_asks_something() -> None:
    assert all(build_problem(case.structure).total_q for case in matrix("L1"))


def test_a_case_of_the_matrix_reaches_at_least_one_key() -> None:
    assert all(effective_sets(build_problem(case.structure)).counts().any() for case in sound_cases())


# refused by the tensors or the run, and not by the problem alone
LATE = {"query-of-another-head-dim", "cache-of-another-head-count", "empty-row-refused"}


@pytest.mark.parametrize("case", refusal_cases(), ids=lambda case: case.axes["refusal"])
def test_a_refusal_case_is_refused_under_its_clause(case: Case) -> None:
    problem = build_problem(case.structure)
    name = case.axes["refusal"]
    if name not in LATE:
        with pytest.raises(RefusedInput) as caught:
            check_problem(problem)
        assert caught.value.clause == case.refuses
        assert "\n" not in str(caught.value)
        return
    check_problem(problem)
    values = build_values(case, problem)
    q, k, v = values.q, values.k, values.v
    if name == "query-of-another-head-dim":
        q = q[..., :-1]
    if name == "cache-of-another-head-count":
        k, v = k[:, :-1], v[:, :-1]
    with pytest.raises(ValueError, match=rf"^[^\n]* \[{case.refuses}\]$"):
        attention(problem, q, k, v)


def test_a_refusal_case_without_its_fault_is_accepted() -> None:
    sound = [case for case in refusal_cases() if case.axes["refusal"] in LATE]
    assert len(sound) == len(LATE)
    for case in sound:
        problem = build_problem(msgspec.structs.replace(case.structure, corruption=None, empty_row="zero"))
        values = build_values(case, problem)
        check_tensors(problem, values.q, values.k, values.v)
        attention(problem, values.q, values.k, values.v)


def test_every_refusal_has_one_case() -> None:
    assert [case.axes["refusal"] for case in refusal_cases()] == list(REFUSALS)


def test_every_case_decodes_from_its_json_into_itself() -> None:
    for case in matrix("L1"):
        assert decode_case(encode_case(case), case.id) == case


def edits(data: bytes) -> dict[str, bytes]:
    return {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "not json": b"{" + data,
        "seed": data.replace(b'"seed": ', b'"seed": 1', 1),
        "length": data.replace(b'"head_dim_vo": ', b'"head_dim_vo": 1', 1),
        "mistyped": data.replace(b'"seed": ', b'"seed": "x", "s": ', 1),
        "unknown kind": data.replace(b'"values": "', b'"values": "un', 1),
        "refusal added": data.replace(b'"refuses": null', b'"refuses": "SET-RANGE"', 1),
        "a list": b"[" + data + b"]",
    }


@pytest.mark.parametrize("edit", edits(b""))
def test_an_edited_or_truncated_case_file_is_refused_in_one_line(edit: str) -> None:
    data = encode_case(sound_cases()[8])
    changed = edits(data)[edit]
    assert changed != data
    with pytest.raises(ValueError, match=r"^case\.json[^\n]*$"):
        decode_case(changed, "case.json")


def test_levels_hold_those_below_and_another_level_is_refused() -> None:
    assert matrix("L0") == smoke_cases()
    assert {c.id for c in matrix("L0")} <= {c.id for c in matrix("L1")}
    with pytest.raises(ValueError, match=r"^level is L9, but [^\n]*$"):
        matrix("L9")


def test_a_matrix_built_again_is_the_same() -> None:
    first = matrix("L1")
    for built in (matrix, smoke_cases, refusal_cases):
        built.cache_clear()
    assert matrix("L1") == first


def has_alias(case: Case) -> bool:
    return any(len(set(row)) < len(row) for row in case.structure.page_table)


def has_hole(case: Case) -> bool:
    lists = case.structure.candidates
    return lists is not None and any(-1 in entries for entries in lists.lists)


def has_duplicate(case: Case) -> bool:
    """Whether some row lists a key twice: two entries, or an entry and the window or a sink."""
    lists = case.structure.candidates
    if lists is None:
        return False
    kept = [[i for i in entries if i != -1] for entries in lists.lists]
    local = lists.window > 0 or lists.num_sink_tokens > 0
    return local or any(len(set(entries)) < len(entries) for entries in kept)


def has_masked_candidate(case: Case) -> bool:
    problem = build_problem(case.structure)
    unmasked = build_problem(msgspec.structs.replace(case.structure, mask_rule=None))
    return bool((effective_sets(unmasked).counts() > effective_sets(problem).counts()).any())


def has_empty_row(case: Case) -> bool:
    return not effective_sets(build_problem(case.structure)).counts().all()


def sees_something(case: Case) -> bool:
    return bool(effective_sets(build_problem(case.structure)).counts().any())


def has_far_keys(case: Case) -> bool:
    """A key past element 2^15, or on page 32 or a later one; or a pool whose pages lie far apart."""
    structure = case.structure
    if structure.page_stride is not None and structure.page_stride > 2**20:
        return True
    last = int(effective_sets(build_problem(structure)).slots.max(initial=0))
    row = structure.num_kv_heads * max(structure.head_dim_qk, structure.head_dim_vo)
    return last * row >= 2**15 or last // structure.page_size >= 32


# what a structure must have before a fault against a clause can move anything
EXERCISES: dict[str, Callable[[Case], bool]] = {
    "SET-ALIAS": has_alias,
    "SET-HOLE": has_hole,
    "SET-DUPLICATE": has_duplicate,
    "MASK-NO-BIAS": has_masked_candidate,
    "EMPTY-OUT": has_empty_row,
    "EMPTY-NEIGHBOUR": lambda case: has_empty_row(case) and sees_something(case),
    "COORD-WIDE": has_far_keys,
    "GQA-MAP": lambda case: case.structure.num_kv_heads > 1,
    "MASK-OFFSET": lambda case: case.structure.mask_rule is not None,
    "MASK-BEFORE-MAX": has_masked_candidate,
    "SET-ORDER": lambda case: case.axes["listing"] != "sorted",
    "QUANT-GRANULARITY": lambda case: any(
        quant is not None and quant.granularity != "tensor"
        for quant in (case.structure.k_quant, case.structure.v_quant)
    ),
    "LSE-SINK": lambda case: case.structure.sink_logits is not None,
    # dout of a sum is expanded from one number
    "COORD-STRIDE": lambda case: (
        case.structure.interleaved or case.structure.layout == "HND" or case.values == "summed_out"
    ),
    "SCORE-ORDER": lambda case: len(case.structure.score_rules) > 1,
    "MERGE-SPLIT": lambda case: (case.structure.hints.num_kv_splits or 1) > 1,
}


@pytest.mark.parametrize("clause", EXERCISES)
def test_a_case_names_a_clause_only_where_its_structure_could_break_it(clause: str) -> None:
    named = [case for case in sound_cases() if clause in case.clauses]
    idle = [case.id for case in named if not EXERCISES[clause](case)]
    assert named
    assert not idle, f"{len(idle)} of {len(named)} cases name {clause} and cannot break it, such as {idle[0]}"


def test_every_axis_value_shows_in_the_structure_of_its_cases() -> None:
    for case in sound_cases():
        s, axes = case.structure, case.axes
        assert f"{s.num_qo_heads}/{s.num_kv_heads}" == axes["heads"]
        assert f"{s.head_dim_qk}/{s.head_dim_vo}" == axes["head_dim"]
        assert (str(s.page_size), s.dtype, s.layout) == (axes["page_size"], axes["dtype"], axes["layout"])
        assert ("dense" if s.candidates is None else s.candidates.granularity) == axes["granularity"]
        assert (s.mask_rule is None) == (axes["mask"] == "none")
        assert (s.sink_logits is None) == (axes["sink"] == "none")
        assert s.interleaved == (axes["strides"] == "interleaved")
        assert str(s.hints.num_kv_splits or 1) == axes["splits"]  # where it is None the backend chooses
        assert (0 in s.seqlens_kv) == (axes["lengths"] == "empty_request")
        assert case.values == axes["values"]
        assert (s.k_quant is None and s.v_quant is None) == (axes["quant"] == "none")
        assert (s.dropout is None) == (axes["dropout"] == "none")
        assert (s.rope is None) == (axes["rope"] == "none")
        assert (not s.epilogue) == (axes["epilogue"] == "none")
        assert (s.head_pages is None) == (axes["head_pages"] == "none")
        assert (s.candidates is not None and s.candidates.form == "sequence") == (axes["form"] == "sequence")
