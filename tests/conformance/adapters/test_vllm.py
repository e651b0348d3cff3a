"""vLLM's kernels under judgement: rows that list keys conform, and how they differ from the contract is named."""

import importlib.util

import pytest
from msgspec.structs import replace

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not here", allow_module_level=True)

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix_case
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.values import check_values

BLOCKS = {"granularity": "block", "sharing": "kv_head", "phase": "chunk", "lengths": "tile_edge", "mask": "causal"}
TOKENS = {"granularity": "token", "sharing": "query_head", "phase": "chunk", "listing": "shuffled"}
SOUND = {
    "vllm-decode": [TOKENS, TOKENS | {"mask": "head_window", "heads": "6/2", "splits": "3"}],
    "vllm-unified": [
        {"mask": "causal_window", "phase": "chunk", "splits": "2", "layout": "HND", "sink": "logits"},
        {"mask": "prefix", "phase": "mixed", "dtype": "bfloat16", "score": "softcap", "head_dim": "80/80"},
        {"score": "alibi", "phase": "decode", "dtype": "float16", "page_size": "1", "heads": "6/2"},
    ],
    "vllm-m3-decode": [BLOCKS, BLOCKS | {"dtype": "bfloat16", "sharing": "shared", "listing": "shuffled"}],
    "vllm-m3-prefill": [BLOCKS, {"mask": "causal", "phase": "prefill", "dtype": "float16", "heads": "4/1"}],
    "vllm-mla-sparse": [TOKENS | {"dtype": "bfloat16", "listing": "holes", "head_dim": "80/80"}],
}


def case_of(axes: dict[str, str]) -> Case:
    return matrix_case("forward", 17, SMOKE_ROW | axes)


@pytest.mark.parametrize(("backend", "axes"), [(name, axes) for name, rows in SOUND.items() for axes in rows])
def test_rows_that_see_a_key_conform(backend: str, axes: dict[str, str]) -> None:
    judged = load_backend(backend, "cpu")
    assert all(judged.capabilities.declares(axis, value) for axis, value in (SMOKE_ROW | axes).items())
    assert judge_case(case_of(axes), judged, checks=[check_values]).state == "PASS"


def test_rows_past_the_last_key_are_placed_by_the_adapter() -> None:
    case = case_of({"mask": "causal_window", "phase": "chunk"})
    lengths = case.structure.seqlens_kv
    moved = replace(case, structure=replace(case.structure, q_offset=tuple(length - 1 for length in lengths)))
    assert judge_case(moved, load_backend("vllm-unified", "cpu"), checks=[check_values]).state == "PASS"


def test_scores_summed_in_half_precision_are_past_the_bound_of_the_lse() -> None:
    case = case_of({"heads": "2/2", "dtype": "float16", "lengths": "one"})
    result = judge_case(case, load_backend("vllm-decode", "cpu"), checks=[check_values])
    assert "lse" in {finding.message[:3] for finding in result.findings}
