"""Where a call's tensors lie: within their storages, apart from each other, and with nothing readable around them."""

import msgspec
import numpy as np
import pytest
import torch

from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case, Structure, build_problem
from attnconform.conformance.cases.values import build_values
from attnconform.conformance.embedding import LEAD
from attnconform.conformance.judge.storage import SPARE_DIM, store_inputs, store_upstream, within_storage
from attnconform.conformance.views import ProblemView


def a_case(**axes: str) -> Case:
    """The first forward case of L1 with some axis values."""
    cases = (c for c in matrix("L1") if c.operation == "forward")
    return next(c for c in cases if all(c.axes[axis] == value for axis, value in axes.items()))


INTERLEAVED = a_case(strides="interleaved", quant="none", phase="prefill")
PLAIN = a_case(strides="dense", quant="none", phase="prefill")
CODED = a_case(strides="dense", quant="e4m3_token")


def stored(case: Case) -> dict[str, torch.Tensor]:
    """Every input tensor of a case, by name."""
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    nan = float("nan")
    tensors, _ = store_inputs(case.structure, problem, values.q, values.k, values.v, device="cpu", poison=nan)
    names = ("q", "k_cache", "v_cache", "k_scale", "v_scale")
    return {name: x for name in names if (x := getattr(tensors, name)) is not None}


@pytest.mark.parametrize("case", [INTERLEAVED, PLAIN, CODED], ids=["interleaved", "plain", "coded"])
def test_every_input_begins_within_its_storage_where_a_wide_load_may_start(case: Case) -> None:
    for name, tensor in stored(case).items():
        assert tensor.storage_offset() >= LEAD, name
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0, name


def test_what_lies_before_an_input_is_no_number() -> None:
    for name, tensor in stored(PLAIN).items():
        assert torch.isnan(tensor.as_strided((LEAD,), (1,), 0)).all(), name


def test_pages_that_overlap_are_refused() -> None:
    cache = INTERLEAVED.structure
    page = 2 * cache.page_size * cache.num_kv_heads * (max(cache.head_dim_qk, cache.head_dim_vo) + SPARE_DIM)
    stored(msgspec.structs.replace(INTERLEAVED, structure=msgspec.structs.replace(cache, page_stride=page)))
    overlapping = msgspec.structs.replace(cache, page_stride=page - 1)
    with pytest.raises(ValueError, match=f"page_stride is {page - 1}, but must be at least {page}"):
        stored(msgspec.structs.replace(INTERLEAVED, structure=overlapping))


def test_a_packed_q_has_the_numbers_of_q_and_rows_farther_apart() -> None:
    problem = build_problem(INTERLEAVED.structure)
    q = stored(INTERLEAVED)["q"]
    assert np.array_equal(q.to(torch.float64).numpy(), build_values(INTERLEAVED, problem).q)
    assert q.stride(0) == (problem.num_qo_heads + 2 * problem.num_kv_heads) * problem.head_dim_qk


def outputs(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse as a forward gets them."""
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    tensors, guards = store_inputs(case.structure, problem, values.q, values.k, values.v, device="cpu", poison=0.0)
    assert all(guard.overruns == () for guard in guards)
    return tensors.out, tensors.lse


def test_outputs_are_without_gaps_where_no_strides_are_asked_for() -> None:
    assert all(output.is_contiguous() for output in outputs(PLAIN))


def test_no_stride_of_an_output_follows_from_its_shape_where_strides_are_asked_for() -> None:
    out, lse = outputs(INTERLEAVED)
    assert out.stride(2) == 1
    assert out.stride(1) > out.shape[2]
    assert out.stride(0) > out.shape[1] * out.stride(1)
    assert lse.stride(0) == 1
    assert lse.stride(1) > lse.shape[0]


def upstream(structure: Structure, dout: np.ndarray, dlse: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as a backward gets them."""
    got, to_lse = store_upstream(dout, dlse, structure, "cpu")
    assert to_lse is not None
    return got, to_lse


def test_a_gradient_of_one_number_is_expanded_from_one_element() -> None:
    dout, dlse = upstream(PLAIN.structure, np.ones((5, 4, 8)), np.zeros((5, 4)))
    assert dout.stride() == (0, 0, 0)
    assert dlse.stride() == (0, 0)
    assert bool((dout == 1).all())
    after = dout.as_strided((5 * 4 * 8 - 1,), (1,), dout.storage_offset() + 1)
    assert bool(torch.isnan(after).all())


def test_gradients_have_their_heads_outermost_where_strides_are_asked_for() -> None:
    numbers = np.arange(160.0).reshape(5, 4, 8)
    dout, dlse = upstream(INTERLEAVED.structure, numbers, numbers[..., 0])
    assert dout.stride() == (8, 40, 1)
    assert dlse.stride() == (1, 5)
    assert np.array_equal(dout.to(torch.float64).numpy(), numbers)


def test_a_view_keeps_its_numbers_and_what_stands_between_its_rows_is_nan() -> None:
    numbers = torch.arange(24.0).view(2, 3, 4)
    view = within_storage(numbers, spare=2)
    assert torch.equal(view, numbers)
    between = view.as_strided((2, 4), (4, 1), LEAD + 3 * 4)
    assert bool(torch.isnan(between).all())


def test_a_strided_view_hands_out_tables_whose_rows_are_apart_and_the_same_numbers() -> None:
    problem = build_problem(INTERLEAVED.structure)
    table = problem.cache.page_table
    apart, plain = (ProblemView(problem, strided=strided).tensor(table) for strided in (True, False))
    assert torch.equal(apart, plain)
    assert plain.is_contiguous()
    assert apart.storage_offset() > 0
    assert apart.stride(0) > table.shape[1]
