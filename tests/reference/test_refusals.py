"""Every refusal of the reference: raised before anything is computed, in one line with index, value and clause."""

import ast
import copy
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnconform.reference import (
    cache,
    candidates,
    custom_rules,
    dropout,
    epilogue,
    problem,
    quantization,
    rope,
    rule_values,
    steps,
)
from attnconform.reference.attention import attention, check_tensors, effective_sets
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import Candidates
from attnconform.reference.custom_rules import MASKS, SCORES, RegisteredScore
from attnconform.reference.dropout import Dropout
from attnconform.reference.epilogue import Activation, Cast, EpilogueStep, Gate
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, check_problem
from attnconform.reference.quantization import Quantization
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

LISTS = Candidates(indptr=np.array([0, 3, 6]), indices=np.array([0, 7, 19, 3, -1, 8]), sharing="shared")
SOUND = AttentionProblem(
    qo_indptr=np.array([0, 1, 2]),
    seqlen_kv=np.array([20, 9]),
    q_offset=np.array([19, 8]),
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=4,
    head_dim_vo=4,
    cache=PagedCache(page_size=8, num_pages=8, page_table=np.array([[5, 2, 7], [1, 4, -1]])),
    sm_scale=0.5,
    candidates=LISTS,
)


def changed(**fields: Any) -> AttentionProblem:
    return replace(SOUND, **fields)


def cached(**fields: Any) -> AttentionProblem:
    return replace(SOUND, cache=replace(SOUND.cache, **fields))


def listed(*lists: list[int], **fields: Any) -> AttentionProblem:
    indptr = np.concatenate([[0], np.cumsum([len(entries) for entries in lists])])
    flat = np.array([i for entries in lists for i in entries])
    return replace(SOUND, candidates=replace(LISTS, indptr=indptr, indices=flat, **fields))


def with_lists(**fields: Any) -> AttentionProblem:
    return replace(SOUND, candidates=replace(LISTS, **fields))


def masked(rule: MaskRule) -> AttentionProblem:
    return replace(SOUND, mask_rule=rule)


def scored(rule: ScoreRule) -> AttentionProblem:
    return replace(SOUND, score_rules=(SoftCap(2.0), rule))


def sequence(*lists: list[int], **fields: Any) -> AttentionProblem:
    return listed(*lists, **{"form": "sequence", "rank_bias": np.array([0.5, 0.25, 0.0])} | fields)


def stored(granularity: Any, scale: Any, code_format: Any = "int8", name: str = "k_quant") -> AttentionProblem:
    quant = Quantization(format=code_format, granularity=granularity, scale=np.asarray(scale, dtype=np.float64))
    return changed(**{name: quant})


def turned(**fields: Any) -> AttentionProblem:
    return changed(rope=replace(Rope(rotary_dim=4, k_position="raw"), **fields))


def ended(*steps: EpilogueStep) -> AttentionProblem:
    return changed(epilogue=steps)


class CountsItsCalls:
    """A rule that answers the same question differently each time."""

    calls = 0

    def __call__(self, *question: Any) -> Any:
        self.calls += 1
        return np.asarray(question[-1]) * self.calls


@pytest.fixture(scope="module", autouse=True)
def impure_rules() -> Iterator[None]:
    """Registered while this file runs alone, so that no other test meets them."""
    MASKS[IMPURE] = CountsItsCalls()
    SCORES[IMPURE] = RegisteredScore(CountsItsCalls(), CountsItsCalls())
    yield
    del MASKS[IMPURE], SCORES[IMPURE]


IMPURE = "tests.impure"
NAN, INF = float("nan"), float("inf")
SECOND = np.array([[True] * 8, [True, False] * 4])

# what is broken -> the problem, and the whole message
REFUSED: dict[str, tuple[AttentionProblem, str]] = {
    "no query heads": (changed(num_qo_heads=0), "num_qo_heads is 0, but must be at least 1 [SAFE-SHAPE]"),
    "no kv heads": (changed(num_kv_heads=0), "num_kv_heads is 0, but must be at least 1 [SAFE-SHAPE]"),
    "no head dim of q": (changed(head_dim_qk=0), "head_dim_qk is 0, but must be at least 1 [SAFE-SHAPE]"),
    "negative head dim": (changed(head_dim_vo=-4), "head_dim_vo is -4, but must be at least 1 [SAFE-SHAPE]"),
    "uneven groups": (
        changed(num_qo_heads=5),
        "num_qo_heads is 5, but must be a multiple of num_kv_heads, 2 [GQA-MAP]",
    ),
    "short qo_indptr": (
        changed(qo_indptr=np.array([0, 2])),
        "len(qo_indptr) is 2, but must be batch_size + 1, 3 [SAFE-SHAPE]",
    ),
    "short q_offset": (changed(q_offset=np.array([19])), "len(q_offset) is 1, but must be 2 [SAFE-SHAPE]"),
    "qo_indptr starts late": (
        changed(qo_indptr=np.array([1, 1, 2])),
        "qo_indptr[0] is 1, but must start at 0 [SAFE-SHAPE]",
    ),
    "qo_indptr falls": (
        changed(qo_indptr=np.array([0, 3, 2])),
        "qo_indptr[2] is 2, but the entry before is 3 [SAFE-SHAPE]",
    ),
    "negative length": (
        changed(seqlen_kv=np.array([20, -1])),
        "seqlen_kv[1] is -1, but must be at least 0 [SAFE-SHAPE]",
    ),
    "scale is nan": (changed(sm_scale=NAN), "sm_scale is nan, but must be finite [SAFE-FINITE]"),
    "scale is infinite": (changed(sm_scale=INF), "sm_scale is inf, but must be finite [SAFE-FINITE]"),
    "too few sinks": (
        changed(sink_logits=np.zeros(2)),
        "sink_logits.shape is (2,), but must be (4,) [SAFE-SHAPE]",
    ),
    "sink is nan": (
        changed(sink_logits=np.array([0, 0, NAN, 0])),
        "sink_logits[2] is nan, but must be finite [SAFE-FINITE]",
    ),
    "sink is minus infinity": (
        changed(sink_logits=np.array([0, -INF, 0, 0])),
        "sink_logits[1] is -inf, but must be finite [SAFE-FINITE]",
    ),
    "repeats asked for": (
        with_lists(form="multiset"),
        "form is multiset, but candidates are a set: a repeated key would add ln 2 to its score [SET-FORM]",
    ),
    "empty blocks": (with_lists(block_size=0), "block_size is 0, but must be at least 1 [SAFE-SHAPE]"),
    "empty query blocks": (with_lists(q_block_size=0), "q_block_size is 0, but must be at least 1 [SAFE-SHAPE]"),
    "negative window": (with_lists(window=-1), "window is -1, but must be at least 0 [SAFE-SHAPE]"),
    "negative sinks": (with_lists(num_sink_tokens=-2), "num_sink_tokens is -2, but must be at least 0 [SAFE-SHAPE]"),
    "too few lists": (listed([0, 7]), "len(indptr) is 2, but must be 3 [SAFE-SHAPE]"),
    "too many lists": (listed([0], [3], []), "len(indptr) is 4, but must be 3 [SAFE-SHAPE]"),
    "no indptr at all": (with_lists(indptr=np.array([], dtype=int)), "len(indptr) is 0, but must be 3 [SAFE-SHAPE]"),
    "indptr starts late": (
        with_lists(indptr=np.array([1, 3, 6])),
        "indptr is (1, 6), but must run from 0 to len(indices), 6 [SAFE-SHAPE]",
    ),
    "indptr ends early": (
        with_lists(indptr=np.array([0, 3, 5])),
        "indptr is (0, 5), but must run from 0 to len(indices), 6 [SAFE-SHAPE]",
    ),
    "indptr falls": (
        with_lists(indptr=np.array([0, 7, 6])),
        "indptr[2] is 6, but the entry before is 7 [SAFE-SHAPE]",
    ),
    "negative that is no hole": (
        listed([0, -2, 19], [3]),
        "indices[1] is -2, but list 0 belongs to a request with seqlen_kv 20 and blocks of 1 [SET-RANGE]",
    ),
    "position at the length": (
        listed([0, 7], [3, 8, 9]),
        "indices[4] is 9, but list 1 belongs to a request with seqlen_kv 9 and blocks of 1 [SET-RANGE]",
    ),
    "block past the end": (
        listed([0, 2], [0, 2], granularity="block", block_size=8),
        "indices[3] is 2, but list 1 belongs to a request with seqlen_kv 9 and blocks of 8 [SET-RANGE]",
    ),
    "block whose first token wraps to 0": (
        listed([0, 1], [2**60], granularity="block", block_size=16),
        f"indices[2] is {2**60}, but list 1 belongs to a request with seqlen_kv 9 and blocks of 16 [SET-RANGE]",
    ),
    "no page size": (cached(page_size=0), "page_size is 0, but must be at least 1 [SAFE-SHAPE]"),
    "no pages": (cached(num_pages=0), "num_pages is 0, but must be at least 1 [SAFE-SHAPE]"),
    "table of another batch": (
        cached(page_table=np.array([[5, 2, 7]])),
        "page_table.shape is (1, 3), but batch_size is 2 [SAFE-SHAPE]",
    ),
    "table of another rank": (
        cached(page_table=np.array([5, 2])),
        "page_table.shape is (2,), but batch_size is 2 [SAFE-SHAPE]",
    ),
    "table too narrow": (
        cached(page_table=np.array([[5, 2], [1, 4]])),
        "seqlen_kv[0] is 20, but page_table has room for 2 pages of 8 [COORD-PAGE-RANGE]",
    ),
    "page at the pool's size": (
        cached(page_table=np.array([[5, 2, 7], [1, 8, -1]])),
        "page_table[1, 1] is 8, but num_pages is 8 [COORD-PAGE-RANGE]",
    ),
    "page missing": (
        cached(page_table=np.array([[5, -1, 7], [1, 4, -1]])),
        "page_table[0, 1] is -1, but num_pages is 8 [COORD-PAGE-RANGE]",
    ),
    "page of another request": (
        cached(owned=SECOND),
        "page_table[1, 0] is 1, but request 1 does not own that page [SAFE-OWNER]",
    ),
    "ownership of another batch": (
        cached(owned=np.ones((1, 8), dtype=bool)),
        "owned.shape is (1, 8), but must be (2, 8) [SAFE-SHAPE]",
    ),
    "blocks at token granularity": (
        listed([0], [0], block_size=4),
        "block_size is 4, but must be 1 at token granularity [SAFE-SHAPE]",
    ),
    "nothing composed": (masked(And(())), "rules is (), but a composition needs at least one rule [MASK-COMPOSE]"),
    "nothing composed within": (
        masked(And((Causal(), Or(())))),
        "rules is (), but a composition needs at least one rule [MASK-COMPOSE]",
    ),
    "window left": (masked(Window(left=-1)), "window_left is -1, but must be None or at least 0 [MASK-WINDOW]"),
    "window right within": (
        masked(Or((Causal(), Window(right=-3)))),
        "window_right is -3, but must be None or at least 0 [MASK-WINDOW]",
    ),
    "prefixes of another batch": (masked(PrefixLM((1,))), "len(prefix_len) is 1, but must be 2 [SAFE-SHAPE]"),
    "prefix is negative": (
        masked(PrefixLM((3, -1))),
        "prefix_len[1] is -1, but must be at least 0 [MASK-PREFIX]",
    ),
    "documents of another batch": (masked(Document(((0,),))), "len(starts) is 1, but must be 2 [SAFE-SHAPE]"),
    "documents start late": (
        masked(Document(((0, 4), (2, 4)))),
        "starts[1] is (2, 4), but must ascend strictly from 0 [MASK-DOCUMENT]",
    ),
    "documents repeat": (
        masked(Document(((0, 4, 4), (0,)))),
        "starts[0] is (0, 4, 4), but must ascend strictly from 0 [MASK-DOCUMENT]",
    ),
    "no documents": (
        masked(Document(((0,), ()))),
        "starts[1] is (), but must ascend strictly from 0 [MASK-DOCUMENT]",
    ),
    "slopes of other heads": (scored(Alibi((0.5, 0.25))), "len(slopes) is 2, but must be 4 [SAFE-SHAPE]"),
    "slope is infinite": (
        scored(Alibi((0.5, INF, 0.0, 0.0))),
        "slopes[1] is inf, but must be finite [SAFE-FINITE]",
    ),
    "cap is zero": (scored(SoftCap(0.0)), "cap is 0.0, but must be finite and above 0 [SAFE-FINITE]"),
    "cap is nan": (scored(SoftCap(NAN)), "cap is nan, but must be finite and above 0 [SAFE-FINITE]"),
    "head windows of other heads": (
        masked(HeadWindow((1, 2, 3, None), (0,))),
        "len(right) is 1, but must be 4 [SAFE-SHAPE]",
    ),
    "one head's window": (
        masked(And((Causal(), HeadWindow((1, 2, -3, None), (None,) * 4)))),
        "window_left is -3, but must be None or at least 0 [MASK-HEAD-WINDOW]",
    ),
    "bias tables of other heads": (scored(RelativeBias(((0.0,),) * 2)), "len(tables) is 2, but must be 4 [SAFE-SHAPE]"),
    "bias table without a middle": (
        scored(RelativeBias(((0.0,) * 2,) * 4)),
        "len(tables)[0] is 2, but must be one odd length, and table 0 has 2 [SCORE-RELATIVE]",
    ),
    "bias tables of two lengths": (
        scored(RelativeBias(((0.0,) * 3, (0.0,) * 3, (0.0,) * 5, (0.0,) * 3))),
        "len(tables)[2] is 5, but must be one odd length, and table 0 has 3 [SCORE-RELATIVE]",
    ),
    "no bias at all": (
        scored(RelativeBias(((),) * 4)),
        "len(tables)[0] is 0, but must be one odd length, and table 0 has 0 [SCORE-RELATIVE]",
    ),
    "bias is nan": (
        scored(RelativeBias(((0.0, 1.0, 2.0), (0.0, 1.0, NAN), (0.0,) * 3, (0.0,) * 3))),
        "tables[1, 2] is nan, but must be finite [SAFE-FINITE]",
    ),
    "mask that nobody registered": (
        masked(Or((Causal(), CustomMask("tests.nobody")))),
        "CustomMask.name is tests.nobody, but no mask rule is registered under that name [RULE-NAME]",
    ),
    "mask that changes its mind": (
        masked(CustomMask(IMPURE)),
        f"CustomMask.name is {IMPURE}, but asked twice about the same keys, it answers twice [RULE-PURE]",
    ),
    "score that nobody registered": (
        scored(CustomScore("tests.nobody")),
        "CustomScore.name is tests.nobody, but no score rule is registered under that name [RULE-NAME]",
    ),
    "score that changes its mind": (
        scored(CustomScore(IMPURE)),
        f"CustomScore.name is {IMPURE}, but asked twice about the same keys, it answers twice [RULE-PURE]",
    ),
    "head pages of other heads": (
        cached(head_pages=np.zeros((8, 4), dtype=int)),
        "head_pages.shape is (8, 4), but must be (8, 2) [SAFE-SHAPE]",
    ),
    "head page at the pool's size": (
        cached(head_pages=np.where(np.arange(16).reshape(8, 2) == 7, 8, 0)),
        "head_pages[3, 1] is 8, but num_pages is 8 [COORD-HEAD-PAGE]",
    ),
    "head page is negative": (
        cached(head_pages=np.where(np.arange(16).reshape(8, 2) == 15, -1, 0)),
        "head_pages[7, 1] is -1, but num_pages is 8 [COORD-HEAD-PAGE]",
    ),
    "set with ranks": (
        with_lists(rank_bias=np.zeros(3)),
        "rank_bias.shape is (3,), but form is 'set', and the entries of a set have no rank [SET-SEQUENCE]",
    ),
    "sequence without ranks": (
        sequence([0], [3], rank_bias=None),
        "rank_bias is None, but a sequence has a bias for each rank [SET-SEQUENCE]",
    ),
    "sequence of blocks": (
        sequence([0], [1], granularity="block", block_size=8),
        "granularity is block, but must be token: what a list does not name has no rank [SET-SEQUENCE]",
    ),
    "sequence with a window": (
        sequence([0], [3], window=2),
        "window is 2, but must be 0: what a list does not name has no rank [SET-SEQUENCE]",
    ),
    "sequence with sinks": (
        sequence([0], [3], num_sink_tokens=1),
        "num_sink_tokens is 1, but must be 0: what a list does not name has no rank [SET-SEQUENCE]",
    ),
    "rank bias is infinite": (
        sequence([0], [3], rank_bias=np.array([0.0, INF])),
        "rank_bias[1] is inf, but must be finite [SAFE-FINITE]",
    ),
    "more entries than ranks": (
        sequence([0], [3, -1, 8, 5]),
        "len(entries) is 4, but list 1 has no more ranks than rank_bias, 3 [SET-SEQUENCE]",
    ),
    "key with two ranks": (
        sequence([0, 7], [3, -1, 3]),
        "indices[4] is 3, but a key has one rank [SET-SEQUENCE]",
    ),
    "unknown code format": (
        stored("tensor", [1.0], "int4"),
        "k_quant.format is int4, but one of int8, float8_e4m3, float8_e5m2 [QUANT-GRANULARITY]",
    ),
    "unknown granularity": (
        stored("row", [1.0], name="v_quant"),
        "v_quant.granularity is row, but one of tensor, head, page, token, channel [QUANT-GRANULARITY]",
    ),
    "scales of another shape": (
        stored("page", np.ones((8, 4)), name="v_quant"),
        "v_quant.scale.shape is (8, 4), but must be (8, 2) for a scale per page [QUANT-GRANULARITY]",
    ),
    "scale is zero": (
        stored("head", [1.0, 0.0]),
        "k_quant.scale[1] is 0.0, but must be finite and above 0 [QUANT-SCALE]",
    ),
    "scale of a channel is nan": (
        stored("channel", [[1.0] * 4, [1.0, 1.0, NAN, 1.0]]),
        "k_quant.scale[1, 2] is nan, but must be finite and above 0 [QUANT-SCALE]",
    ),
    "everything is dropped": (
        changed(dropout=Dropout(1.0, 0)),
        "dropout.rate is 1.0, but must be at least 0 and below 1 [DROPOUT-RATE]",
    ),
    "dropout rate is nan": (
        changed(dropout=Dropout(NAN, 0)),
        "dropout.rate is nan, but must be at least 0 and below 1 [DROPOUT-RATE]",
    ),
    "seed of 65 bits": (
        changed(dropout=Dropout(0.5, 2**64)),
        f"dropout.seed is {2**64}, but must fit 64 bits [DROPOUT-RATE]",
    ),
    "odd rotary_dim": (
        turned(rotary_dim=3),
        "rotary_dim is 3, but must be even, at least 2 and at most head_dim_qk, 4 [ROPE-PAIRS]",
    ),
    "rotary_dim beyond the head": (
        turned(rotary_dim=6),
        "rotary_dim is 6, but must be even, at least 2 and at most head_dim_qk, 4 [ROPE-PAIRS]",
    ),
    "nothing turns": (
        turned(rotary_dim=0),
        "rotary_dim is 0, but must be even, at least 2 and at most head_dim_qk, 4 [ROPE-PAIRS]",
    ),
    "base is zero": (turned(theta=0.0), "theta is 0.0, but must be finite and above 0 [SAFE-FINITE]"),
    "unknown key positions": (
        turned(k_position="cooked"),
        "k_position is cooked, but must be 'encoded' or 'raw' [ROPE-ENCODED]",
    ),
    "encoded page at two places": (
        replace(cached(page_table=np.array([[5, 2, 7], [1, 5, -1]])), rope=Rope(rotary_dim=4)),
        "page_table[1, 1] is 5, but its keys were rotated for logical page 0, and k_position is 'encoded' "
        "[ROPE-ENCODED]",
    ),
    "unknown activation": (
        ended(Cast("float16"), Activation("gelu")),
        "activation[1] is gelu, but must be one of relu, silu [MERGE-EPILOGUE]",
    ),
    "unknown cast": (
        ended(Cast("float64")),
        "cast[0] is float64, but must be one of float32, bfloat16, float16 [MERGE-EPILOGUE]",
    ),
    "gates of other heads": (ended(Gate((0.0,))), "len(gate.logits)[0] is 1, but must be 4 [SAFE-SHAPE]"),
    "gate is infinite": (
        ended(Activation("relu"), Gate((0.0, INF, 0.0, 0.0))),
        "gate.logits[1] is inf, but must be finite [SAFE-FINITE]",
    ),
}


def refusal_of(call: Callable[[], object]) -> RefusedInput:
    with pytest.raises(RefusedInput) as caught:
        call()
    return caught.value


def test_the_sound_problem_is_not_refused() -> None:
    check_problem(SOUND)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_line_with_index_value_and_clause(name: str) -> None:
    broken, message = REFUSED[name]
    error = refusal_of(lambda: check_problem(broken))
    assert str(error) == message
    assert f"[{error.clause}]" in message
    assert f"is {error.value}," in message
    assert error.index is None or f"[{', '.join(map(str, error.index))}] is" in message


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_never_reaches_arithmetic(name: str) -> None:
    broken, message = REFUSED[name]
    never_read = np.empty(0)
    assert str(refusal_of(lambda: steps.Steps().forward(broken, never_read, never_read, never_read))) == message
    assert str(refusal_of(lambda: effective_sets(broken))) == message


REFUSING = (
    problem,
    rule_values,
    cache,
    candidates,
    custom_rules,
    quantization,
    dropout,
    rope,
    epilogue,
)


def raise_lines(module: Any) -> set[tuple[str, int]]:
    """Where a module raises RefusedInput."""
    tree = ast.parse(Path(module.__file__).read_text())
    return {
        (Path(module.__file__).name, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and "RefusedInput" in ast.unparse(node)
    }


def test_every_refusal_in_the_reference_has_a_case_here() -> None:
    raised = set()
    for broken, _ in REFUSED.values():
        try:
            check_problem(broken)
        except RefusedInput as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            assert trace is not None
            raised.add((Path(trace.tb_frame.f_code.co_filename).name, trace.tb_lineno))
    written = set().union(*(raise_lines(module) for module in REFUSING))
    assert raised == written


def test_an_empty_row_is_refused_where_the_problem_says_so() -> None:
    broken = replace(listed([0, 7], [-1, -1]), empty_row="refuse")
    q, pool = np.ones((2, 4, 4)), np.ones((64, 2, 4))
    error = refusal_of(lambda: attention(broken, q, pool, pool))
    assert str(error) == "row is 1, but it sees no key and empty_row is 'refuse' [EMPTY-POLICY]"
    assert attention(replace(broken, empty_row="zero"), q, pool, pool).lse[1].tolist() == [-INF] * 4


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        ("q", (2, 4, 8), (2, 4, 4)),
        ("q", (3, 4, 4), (2, 4, 4)),
        ("k", (64, 4, 4), (64, 2, 4)),
        ("v", (63, 2, 4), (64, 2, 4)),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(name: str, shape: tuple[int, ...], want: tuple[int, ...]) -> None:
    tensors = {"q": np.ones((2, 4, 4)), "k": np.ones((64, 2, 4)), "v": np.ones((64, 2, 4))} | {name: np.ones(shape)}
    message = f"{name}.shape is {shape}, but the problem has {want} [SAFE-SHAPE]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_tensors(SOUND, **tensors)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"]
)
def test_a_refusal_survives_being_sent_to_another_process(again: Callable[[RefusedInput], RefusedInput]) -> None:
    error = refusal_of(lambda: check_problem(REFUSED["page missing"][0]))
    copied = again(error)
    assert str(copied) == str(error)
    assert (copied.clause, copied.name, copied.value, copied.index) == ("COORD-PAGE-RANGE", "page_table", -1, (0, 1))


def test_rows_that_belong_to_no_request_are_refused() -> None:
    nobody = np.empty(0, dtype=np.int64)
    broken = replace(
        SOUND,
        qo_indptr=np.array([5]),
        seqlen_kv=nobody,
        q_offset=nobody,
        cache=replace(SOUND.cache, page_table=np.empty((0, 3), dtype=np.int64)),
        candidates=None,
    )
    assert refusal_of(lambda: check_problem(broken)).name == "qo_indptr"
