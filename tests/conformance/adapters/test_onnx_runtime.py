"""ONNX Runtime's operators under judgement: what conforms, and the faults that the judge names."""

import msgspec
import pytest

pytest.importorskip("onnxruntime")

from attnconform.conformance.adapters.onnx_runtime import OrtAttention, OrtGroupQuery, OrtSparse
from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import Backend, Unavailable
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix_case
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.values import check_values

BLOCKS = {"granularity": "block", "sharing": "query_head", "phase": "chunk"}
OPERATORS = ("ort-attention", "ort-gqa", "ort-sparse")


def plain_case(**axes: str) -> Case:
    return matrix_case("forward", 11, SMOKE_ROW | axes)


def judged(backend: Backend, **axes: str) -> str:
    return judge_case(plain_case(**axes), backend).state


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("heads", ["4/2", "2/2"])
@pytest.mark.parametrize("name", OPERATORS)
def test_rows_that_list_blocks_conform(name: str, heads: str, dtype: str) -> None:
    assert judged(load_backend(name, "cpu"), **BLOCKS, heads=heads, dtype=dtype) == "PASS"


@pytest.mark.parametrize("name", OPERATORS)
def test_a_causal_chunk_conforms_whatever_its_offset(name: str) -> None:
    """A request that ends while others go on leaves empty rows, which only one of the operators has right."""
    findings = judge_case(plain_case(mask="causal", phase="chunk"), load_backend(name, "cpu")).findings
    where = [finding.message.partition(":")[0] for finding in findings]
    assert where == ([] if name == "ort-attention" else ["planned for a request that ended"])
    assert all("EMPTY-OUT" in finding.clauses for finding in findings)


@pytest.mark.parametrize("score", ["none", "alibi"])
def test_a_request_without_keys_is_zero_with_masks_of_both_kinds(score: str) -> None:
    case = plain_case(score=score, phase="chunk")
    structure = case.structure
    lengths, pages = (0, *structure.seqlens_kv[1:]), ((), *structure.page_table[1:])
    structure = msgspec.structs.replace(structure, seqlens_kv=lengths, page_table=pages)
    ended = msgspec.structs.replace(case, structure=structure, clauses=(*case.clauses, "EMPTY-OUT"))
    assert judge_case(ended, OrtAttention(), checks=[check_values]).state == "PASS"


@pytest.mark.parametrize("score", ["softcap", "softcap_relative", "alibi"])
@pytest.mark.parametrize("backend", [OrtAttention(), OrtGroupQuery()], ids=lambda b: b.name)
def test_scores_are_capped_before_a_bias(backend: Backend, score: str) -> None:
    assert judged(backend, score=score, granularity="token", sharing="query_head", phase="chunk") == "PASS"


@pytest.mark.parametrize("mask", ["causal", "causal_window", "none"])
def test_sinks_conform_beside_the_operators_own_masks(mask: str) -> None:
    assert judged(OrtGroupQuery(), sink="logits", mask=mask, phase="prefill") == "PASS"


def test_the_operators_own_causal_mask_runs_where_it_says_the_problem() -> None:
    result = judge_case(plain_case(mask="causal_window", phase="prefill"), OrtGroupQuery())
    assert (result.state, result.path) == ("PASS", "causal")
    assert judge_case(plain_case(mask="document", phase="prefill"), OrtGroupQuery()).path == "bias"


def test_an_empty_row_of_the_attention_operator_is_zero() -> None:
    assert judged(OrtAttention(), granularity="token", listing="holes", empty="first", phase="chunk") == "PASS"


@pytest.mark.parametrize(
    ("backend", "granularity", "given"),
    [(OrtGroupQuery(), "token", "nan"), (OrtSparse(), "block", "")],  # NaN; the mean of V
    ids=["ort-gqa", "ort-sparse"],
)
def test_an_empty_row_of_the_others_is_reported(backend: Backend, granularity: str, given: str) -> None:
    result = judge_case(plain_case(empty="first", phase="chunk", granularity=granularity, listing="holes"), backend)
    assert not result.is_conforming
    assert any("EMPTY-OUT" in finding.clauses and given in finding.message for finding in result.findings)


def test_a_row_before_the_first_key_is_reported_as_empty_and_does_not_crash() -> None:
    case = plain_case(mask="causal", phase="chunk")
    structure = msgspec.structs.replace(case.structure, q_offset=(-1,) * len(case.structure.seqlens_q))
    early = msgspec.structs.replace(case, structure=structure, clauses=(*case.clauses, "EMPTY-OUT"))
    result = judge_case(early, OrtSparse(), checks=[check_values])
    assert {finding.state for finding in result.findings} == {"FAIL_value"}
    assert all("EMPTY-OUT" in finding.clauses and "want 0" in finding.message for finding in result.findings)


@pytest.mark.parametrize("axes", [{"dtype": "bfloat16"}, {"score": "alibi_softcap"}, {"sink": "logits"}])
def test_what_the_attention_operator_cannot_say_is_unsupported(axes: dict[str, str]) -> None:
    assert judged(OrtAttention(), **axes) == "UNSUPPORTED"


@pytest.mark.parametrize("name", OPERATORS)
def test_they_are_of_the_cpu_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(Unavailable, match="of the CPU"):
        load_backend(name, "cuda")
