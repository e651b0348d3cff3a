"""fla-core's NSA in the interpreter: forward and backward conform on sets of blocks, and its faults are named."""

import msgspec
import pytest
import torch

pytest.importorskip("fla")
if torch.cuda.is_available():
    pytest.skip("Triton compiles here", allow_module_level=True)

from attnconform.conformance.adapters.fla_nsa import FlaNsa, FlaNsaAnyWidth
from attnconform.conformance.cases.structure import CandidateStructure, Case, Structure, named
from attnconform.conformance.judge.judge import judge_case
from attnconform.reference.rules import Causal, MaskRule

pytestmark = pytest.mark.filterwarnings("ignore")  # division by zero in the interpreter, and a notice about the CPU
BLOCK = 16


def case_of(
    *lists: tuple[int, ...], operation: str = "forward", kv: int = 24, mask: MaskRule | None = None, heads: int = 2
) -> Case:
    """A row for each of the lists of blocks, at the end of one request."""
    structure = Structure(
        seqlens_q=(len(lists),), seqlens_kv=(kv,), num_qo_heads=heads, num_kv_heads=1, head_dim_qk=16, head_dim_vo=16,
        page_size=BLOCK, num_pages=4, page_table=((2, 0),), sm_scale=0.25, mask_rule=mask,
        candidates=CandidateStructure(lists=lists, granularity="block", block_size=BLOCK, sharing="shared"),
    )  # fmt: skip
    clauses = ("SET-IDENTITY", "SET-DUPLICATE", "EMPTY-OUT", "GRAD-EDGES")
    case = Case(id="", level="L1", operation=operation, structure=structure, values="normal", seed=3, clauses=clauses)
    return named(case, "nsa")


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_lists_with_holes_conform(operation: str) -> None:
    assert judge_case(case_of((-1, 1), (0, 1), operation=operation, mask=Causal()), FlaNsa()).state == "PASS"


def test_a_row_sees_all_where_nothing_is_masked() -> None:
    assert judge_case(case_of((1, 0), (1, -1), (0, -1)), FlaNsa()).state == "PASS"


def test_a_repeated_block_counts_again_and_is_named() -> None:
    result = judge_case(case_of((0, 0, 1)), FlaNsa())
    assert result.findings[0].state == "FAIL_membership"
    assert result.findings[0].clauses[0] == "SET-DUPLICATE"


def test_an_empty_row_is_nan_and_is_named() -> None:
    result = judge_case(case_of((-1, -1), (0, 1)), FlaNsa())
    assert any("EMPTY-OUT" in finding.clauses and "nan" in finding.message for finding in result.findings)


def test_backward_takes_no_lists_of_three() -> None:
    result = judge_case(case_of((0, 1, -1), operation="backward"), FlaNsaAnyWidth())
    assert result.state == "CRASH"
    assert "power of 2" in result.findings[0].message


def test_lists_of_three_are_filled_up_to_four() -> None:
    assert judge_case(case_of((0, 1, -1), operation="backward"), FlaNsa()).state == "PASS"


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_a_group_of_24_is_filled_up_to_32(operation: str) -> None:
    assert judge_case(case_of((0, 1), operation=operation, heads=24), FlaNsa()).state == "PASS"


def test_a_row_before_the_first_key_sees_nothing_and_the_rows_after_it_do() -> None:
    case = case_of((0, 1), (0, 1), operation="backward", mask=Causal())
    early = msgspec.structs.replace(case, structure=msgspec.structs.replace(case.structure, q_offset=(-1,)))
    states = {(f.state, f.message.partition(" is ")[0]) for f in judge_case(early, FlaNsa()).findings}
    assert not any(state == "CRASH" for state, _ in states)
    assert {message[:6] for _, message in states if message.startswith("out[")} == {"out[0,"}
