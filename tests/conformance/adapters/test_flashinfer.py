"""FlashInfer's adapters before a stand-in of its API that computes what the package documents, and checks each call."""

import importlib
import importlib.util
import inspect
import sys
from functools import partial, partialmethod
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from attnconform.conformance.adapters import flashinfer_package, registry
from attnconform.conformance.adapters.flashinfer_package import head_groups
from attnconform.conformance.adapters.flashinfer_sparse import runs, tiles_of
from attnconform.conformance.backend import Unavailable
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix, matrix_case
from attnconform.conformance.command_line import main
from attnconform.conformance.judge.judge import FORWARD_CHECKS, judge_case, undeclared
from attnconform.conformance.judge.lifecycle import check_allocations
from attnconform.conformance.judge.trial import Trial
from attnconform.reference.candidates import HOLE

MODULES = ("flashinfer_decode", "flashinfer_prefill", "flashinfer_sparse", "flashinfer_cuda_merge")
NAMES = [name for name, where in registry.BUNDLED.items() if where.partition(":")[0].rpartition(".")[2] in MODULES]
PAGED = [name for name in NAMES if "decode" in name or "prefill" in name]
# The stand-in allocates in its own arithmetic.
CHECKS = [check for check in FORWARD_CHECKS if check is not check_allocations]
# Rows that every adapter but those named at each declares.
ROW = SMOKE_ROW | {"dtype": "bfloat16", "phase": "chunk", "page_size": "8"}
PLAIN = {"granularity": "token", "sharing": "kv_head"}


def load_stand_in():
    spec = importlib.util.spec_from_file_location("fake_flashinfer", Path(__file__).with_name("fake_flashinfer.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAKE = load_stand_in()


@pytest.fixture
def stand_in(monkeypatch):
    """Adapters find the stand-in, and a CPU will do."""
    monkeypatch.setattr(flashinfer_package, "load_flashinfer", lambda name, device: FAKE)
    monkeypatch.setattr(flashinfer_package, "WORKSPACE_BYTES", 1 << 10)
    return FAKE


def backend_of(name):
    module, _, class_name = registry.BUNDLED[name].partition(":")
    return getattr(importlib.import_module(module), class_name)("cpu")


def test_every_wrapper_has_its_adapter():
    assert len(NAMES) == 8


def judged(name, **axes):
    """A case's result, and whether the adapter declares the case."""
    backend, case = backend_of(name), matrix_case("forward", 11, ROW | axes)
    return judge_case(case, backend, CHECKS), undeclared(case, backend) is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "axes",
    [
        {"lengths": "tile_edge", "strides": "interleaved"},
        {"dtype": "float16", "heads": "6/2", "sharing": "kv_head", "granularity": "block", "q_block": "4"},
        {"granularity": "token", "sharing": "query_head", "listing": "shuffled", "local": "window_and_sinks"},
        {"granularity": "block", "sharing": "shared", "listing": "shuffled", "page_size": "16", "pages": "aliased"},
        {"mask": "causal_window", "score": "softcap", "layout": "HND", "strides": "interleaved"},
        {"mask": "head_window", "phase": "mixed", "lengths": "long_and_short"},
        {"granularity": "token", "sharing": "kv_head", "empty": "first", "splits": "3"},
        {"granularity": "token", "listing": "holes_and_duplicates", "splits": "2", "phase": "decode"},
        {"lengths": "empty_request", "pages": "high", "splits": "8"},
    ],
)
def test_what_an_adapter_declares_conforms(stand_in, name, axes):
    result, is_declared = judged(name, **axes)
    assert (result.state == "PASS") == is_declared, result.findings
    assert is_declared or result.state == "UNSUPPORTED"


# flashinfer-bsr-lists is there for lists out of range; elsewhere it declares only rows that no level has
@pytest.mark.parametrize("name", [name for name in NAMES if name != "flashinfer-bsr-lists"])
def test_every_adapter_declares_cases_of_the_levels(stand_in, name):
    backend = backend_of(name)
    declared = [case for case in matrix("L3") if case.operation == "forward" and undeclared(case, backend) is None]
    assert len(declared) >= 10


@pytest.mark.parametrize("name", PAGED)
def test_plans_are_made_run_and_made_again_in_their_own_buffers(stand_in, name):
    backend = backend_of(name)
    axes = {"granularity": "dense", "sharing": "shared"} if name == "flashinfer-decode-pages" else PLAIN
    case = matrix_case("forward", 11, ROW | axes)
    lifecycle = ("PLAN-REPLAN", "PLAN-WORKSPACE", "PLAN-INPUTS", "PLAN-APART", "PLAN-COPY", "PLAN-REPLAY")
    case = msgspec.structs.replace(case, clauses=(*case.clauses, *lifecycle))
    result = judge_case(case, backend, CHECKS)
    assert result.state == "PASS", result.findings
    assert "nothing is captured on cpu" in result.findings[0].message


def twice_the_scale(plan, *arguments, **options):
    return plan(*arguments, **{**options, "sm_scale": 2 * options["sm_scale"]})


def pages_turned_round(plan, wrapper, indptr, pages, *arguments, **options):
    return plan(wrapper, indptr, pages.flip(0), *arguments, **options)


@pytest.mark.parametrize("spoilt", [twice_the_scale, pages_turned_round])
def test_a_wrong_argument_is_seen(stand_in, monkeypatch, spoilt):
    wrapper = stand_in.BatchDecodeWithPagedKVCacheWrapper
    monkeypatch.setattr(wrapper, "plan", partialmethod(partial(spoilt, wrapper.plan)))
    assert judged("flashinfer-decode", **PLAIN)[0].state.startswith("FAIL")


def test_an_lse_of_minus_fifty_thousand_for_an_empty_row_is_reported(stand_in, monkeypatch):
    """What the kernels of 0.6.13 start from where they mean minus infinity."""
    wrapper = stand_in.BatchDecodeWithPagedKVCacheWrapper
    run = wrapper.run

    def run_from_minus_fifty_thousand(self, *arguments, lse, **options):
        run(self, *arguments, lse=lse, **options)
        lse.clamp_(min=-5e4)

    monkeypatch.setattr(wrapper, "run", run_from_minus_fifty_thousand)
    result, _ = judged("flashinfer-decode", **PLAIN, empty="first")
    assert result.state == "FAIL_value"
    assert any("EMPTY-LSE" in finding.clauses for finding in result.findings)


@pytest.mark.parametrize("splits", ["2", "8"])
@pytest.mark.parametrize("values", ["zero_q", "equal_keys", "peaked"])
def test_states_in_float16_are_declared(stand_in, values, splits):
    """Where all keys weigh alike, nothing but the states is rounded on the way to out."""
    result, is_declared = judged("flashinfer-merge-cuda", dtype="float16", mask="none", values=values, splits=splits)
    assert is_declared
    assert result.state == "PASS", [finding.message for finding in result.findings]
    assert result.usage["out"] > 0.1  # the bound is of that rounding, and not far above it


def clipped(plan, wrapper, indptr, indices, rows, keys, *arguments, **options):
    """What 0.6.13 does: an index equal to the number of blocks passes its test, and is read."""
    return plan(wrapper, indptr, indices.clamp(max=keys // arguments[1] - 1), rows, keys, *arguments, **options)


@pytest.mark.parametrize(("is_checked", "state"), [(True, "REFUSED_OK"), (False, "NOT_REFUSED")])
def test_a_block_index_equal_to_their_number_has_to_be_refused(stand_in, monkeypatch, is_checked, state):
    wrapper = stand_in.BlockSparseAttentionWrapper
    if not is_checked:
        monkeypatch.setattr(wrapper, "plan", partialmethod(partial(clipped, wrapper.plan)))
    case = next(c for c in matrix("L1") if "block-past-the-end" in c.id)
    case = msgspec.structs.replace(case, axes={}, structure=msgspec.structs.replace(case.structure, dtype="float16"))
    assert judge_case(case, backend_of("flashinfer-bsr-lists")).state == state


def test_the_hole_of_an_empty_list_is_no_block(stand_in):
    case = matrix_case("forward", 5, ROW | {"granularity": "block", "sharing": "shared", "empty": "first"})
    backend = backend_of("flashinfer-bsr-lists")
    view = Trial(case, backend).view
    lists = view.spec.candidates
    assert HOLE in lists.indices
    for n in range(view.spec.batch_size):
        for group in head_groups(view.spec):
            tiles = backend.tiles(view, n, group)
            assert HOLE not in tiles.indices
            assert len(tiles.members) == len(tiles.indices) == tiles.indptr[-1]


def test_tiles_and_runs_give_the_mask_back():
    torch.manual_seed(3)
    mask = torch.rand(5, 21) < 0.2
    mask[:, 8:12] = False
    tiles = tiles_of(mask, 2, 4)
    whole = torch.zeros(3, 6, 2, 4, dtype=torch.bool)
    whole[torch.repeat_interleave(torch.arange(3), tiles.indptr.diff().long()), tiles.indices.long()] = tiles.members
    assert torch.equal(whole.transpose(1, 2).reshape(6, 24)[:5, :21], mask)
    assert tiles.members.flatten(1).any(1).all()
    starts, sizes = runs(mask[None], dim=2)
    assert torch.equal(mask[:, starts].repeat_interleave(sizes, 1), mask)
    assert len(starts) < 21


@pytest.mark.parametrize("name", NAMES)
def test_without_the_package_one_line_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    done = CliRunner().invoke(main, ["run", "-b", name, "--device", "cpu"])
    assert done.exit_code == 2
    assert done.output == f"attnconform: {name} needs the package flashinfer: {flashinfer_package.INSTALL}\n"


def test_without_a_gpu_the_package_alone_does_not_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", FAKE)
    with pytest.raises(Unavailable, match="flashinfer-decode is a kernel of the GPU, but device is 'cpu'"):
        flashinfer_package.load_flashinfer("flashinfer-decode", "cpu")


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
@pytest.mark.parametrize("name", [name for name in vars(FAKE) if name.endswith("Wrapper") or name.startswith("merge_")])
def test_the_stand_in_has_the_packages_signatures(name):
    import flashinfer

    ours, theirs = getattr(FAKE, name), getattr(flashinfer, name)
    pairs = (
        [(ours, theirs)]
        if name.startswith("merge_")
        else [(getattr(ours, method), getattr(theirs, method)) for method in ("__init__", "plan", "run")]
    )
    for mine, real in pairs:
        found = inspect.signature(inspect.unwrap(real)).parameters
        assert [(p.name, p.kind, p.default) for p in inspect.signature(mine).parameters.values()] == [
            (p.name, p.kind, p.default) for p in found.values()
        ]
