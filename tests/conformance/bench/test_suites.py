"""Suites on tiny shapes in the interpreter: their answers, their peers and their figures; never their times."""

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from attnconform.conformance.bench import (
    block_mask,
    block_sparse,
    block_sparse_work,
    decode,
    fallbacks,
    index,
    nsa,
    nsa_work,
    prefill,
    prefill_work,
    quant,
)
from attnconform.conformance.bench.autotuning import autotune
from attnconform.conformance.bench.decode_work import TINY, make_work
from attnconform.conformance.bench.figure_text import tail_lines
from attnconform.conformance.bench.honesty import ERROR_BOUND
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.sdpa_prefill import cudnn_prefill
from attnconform.conformance.bench.selector import Selector
from attnconform.conformance.bench.sweep_dense import torch_rows

INTERPRETED = SimpleNamespace(is_real=False)


@pytest.fixture(scope="module")
def decode_rows(machine):
    rows = decode.bundled_rows(decode.draw_of(TINY, machine), machine, BenchOptions(peer="sdpa"))
    return {row.stage: row for row in rows}


def test_a_step_has_its_stages_apart_and_together(decode_rows):
    wanted = {"route", "top-k", "index", "one-off plan", "attention", "launch", "from candidates", "end to end"}
    assert wanted <= decode_rows.keys()


def test_a_step_launch_by_launch_stands_beside_the_same_peer_as_its_graph(decode_rows):
    graph, launched = (decode_rows[stage] for stage in ("from candidates", "from candidates, launched"))
    assert launched.peer.timing == graph.peer.timing is not None
    assert launched.path == graph.path == decode_rows["attention of a tier"].path
    assert launched.clock == "host"


def test_the_attention_that_was_timed_is_right_and_reads_only_its_lists(decode_rows):
    row = decode_rows["attention"]
    assert row.error <= ERROR_BOUND
    assert row.poisoned_error <= ERROR_BOUND


def test_the_peers_answer_is_ours(decode_rows):
    assert difference(decode_rows["attention"]) < 1e-3


def test_figures_of_a_decode_batch_are_counted(decode_rows):
    figures = decode_rows["attention"].figures
    keys = TINY.num_lists * TINY.candidates
    assert figures.flops_useful == 4 * keys * TINY.group_size * TINY.head_dim
    assert figures.row_lengths.max == TINY.candidates
    assert figures.flops_executed >= figures.flops_useful
    assert figures.workspace_reserved > figures.workspace_used
    assert sum(b.programs for b in figures.program_histogram) == figures.programs


def test_a_batch_that_falls_back_is_counted_by_its_reason_and_its_events_stand_apart(machine):
    [row] = fallbacks.fallback_rows(machine, BenchOptions(seconds=0.1))
    assert row.error <= ERROR_BOUND
    assert row.figures.fallbacks == {"dense_rate": 1}
    assert {s.group for s in row.slices if s.by == "fallback"} == {"none", "dense_rate"}
    assert row.clock == "host"
    assert "fallbacks dense_rate: 1" in next(tail_lines(row))


def test_tuning_tries_as_many_choices_as_its_time_allows(machine):
    from attnconform.kernels.sparse_attention.tuning import Choice

    work, choices = make_work(TINY, machine), (Choice(tile_kv=16), Choice(tile_kv=32))
    tuned = autotune(work, machine, choices)
    assert (tuned.tried, tuned.offered) == (2, 2)
    assert 0 < tuned.best_us <= tuned.safe_us
    assert autotune(work, machine, choices, seconds=0.0).tried == 0


def test_the_reference_selector_finds_the_page_of_the_key_it_looks_for(machine):
    work = make_work(TINY, machine)
    page = 3
    work.k_cache[work.page_table[0, page], :, 0] = 50 * torch.ones(TINY.head_dim)
    selector = Selector.of(work, 1)
    chosen = selector.topk(selector.route(torch.ones_like(work.q)))
    assert int(chosen[0, 0, 0]) == page


def test_the_index_has_the_slots_that_torch_finds(machine):
    row = next(index.index_rows(machine, BenchOptions()))
    assert row.error == 0
    assert row.peer.difference.endswith("0.00e+00")


@pytest.mark.parametrize(("form", "granularity"), quant.KINDS)
def test_a_quantized_cache_gives_the_answer_of_its_numbers(machine, form, granularity):
    row = quant.quant_row(form, granularity, machine, BenchOptions(seconds=0.1))
    assert row.error <= ERROR_BOUND
    assert row.figures.bytes_ideal < make_work(TINY, machine).bytes
    assert row.peer.timing is not None, row.peer.error


@pytest.mark.parametrize("shape", nsa_work.shapes(INTERPRETED), ids=lambda s: f"kept {s.kept}")
def test_nsa_rows_see_their_own_causal_part_of_their_blocks(shape, machine):
    row = next(nsa.shape_rows(shape, machine, BenchOptions()))
    assert row.error <= ERROR_BOUND
    assert row.phase == "prefill"


def kept_share(blocks):
    """Mean share of a row's blocks that it has from the row before."""
    pairs = [(set(a.tolist()), set(b.tolist())) for a, b in pairwise(blocks)]
    return sum(len(a & b) / len(b) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize(("kept", "least", "most"), [(0.0, 0.05, 0.2), (0.75, 0.7, 0.85)])
def test_neighbouring_rows_keep_as_many_blocks_as_asked(kept, least, most):
    blocks = nsa_work.draw_blocks(nsa_work.NsaShape(seqlen=16_384, num_kv_heads=1, kept=kept), "cpu")
    assert least < kept_share(blocks[14_000:15_000, 0]) < most


def test_a_row_selects_its_own_block_and_no_block_twice():
    shape = nsa_work.NsaShape(seqlen=4_096, num_kv_heads=2, kept=0.75)
    blocks = nsa_work.draw_blocks(shape, "cpu")
    own = torch.arange(shape.seqlen)[:, None, None] // shape.block_size
    assert ((blocks == own).sum(-1) == 1).all()
    assert (blocks <= own).all()
    ids = blocks.sort(-1).values
    assert not ((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)).any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_chosen_blocks_of_a_prompt_are_attended_and_no_others(machine, is_causal):
    shape = replace(block_sparse_work.TINY_BLOCKS, is_causal=is_causal)
    run = block_sparse.OurBlocks(block_sparse_work.make_blocks(shape, machine))
    assert block_sparse.checked_error(run) <= ERROR_BOUND
    assert run.work.edges == int(run.plan.num_qo_heads * run.work.row_lengths.sum())
    assert run.work.rate < 1


def test_flex_over_chosen_blocks_gives_our_answer(machine):
    rows = list(block_sparse.block_sparse_rows(machine, BenchOptions(peer="flex")))
    assert [row.stage for row in rows] == ["attention", "plan"]
    assert rows[0].error <= ERROR_BOUND
    assert difference(rows[0]) < 1e-3


def test_the_dense_side_of_a_chunk_is_every_key_that_its_rows_may_see(machine):
    shape = replace(block_sparse_work.TINY_BLOCKS, is_causal=True, rows=16)
    work = block_sparse_work.make_blocks(shape, machine).dense()
    run = block_sparse.OurBlocks(work)
    assert block_sparse.checked_error(run) <= ERROR_BOUND
    assert work.rate == 1
    q, k, v = (x.reshape(-1, *x.shape[-2:]).transpose(0, 1)[None] for x in work.inputs)
    theirs = torch_rows(q, k, v)()
    assert torch.allclose(theirs[0].transpose(0, 1), run.out, atol=1e-5)


def test_our_block_mask_is_that_of_create_block_mask(machine):
    [row] = block_mask.block_mask_rows(machine, BenchOptions(peer="flex"))
    assert row.error == 0
    assert difference(row) == 0
    assert row.clock == "host"


def test_kinds_of_blocks_are_told_apart(machine):
    work = prefill_work.PrefillWork("w", 1, 4 * block_mask.BLOCK, window=2 * block_mask.BLOCK, dtype=torch.float32)
    kinds = block_mask.wanted_kinds(work, machine)
    assert kinds.tolist() == [[1, 0, 0, 0], [2, 1, 0, 0], [1, 2, 1, 0], [0, 1, 2, 1]]
    assert (block_mask.our_kinds(block_mask.our_block_mask(work, machine)) == kinds).all()


def test_flex_over_listed_blocks_of_a_decode_batch_gives_our_answer(machine):
    options = BenchOptions(peer="flex", stages=("attention",))
    rows = {row.stage: row for row in decode.bundled_rows(decode.draw_of(TINY, machine), machine, options)}
    assert rows.keys() == {"attention", "launch"}
    assert difference(rows["attention"]) < 1e-3


@pytest.mark.parametrize("peer", ["flex", "dense-mask"])
def test_a_windows_peer_gives_our_answer(machine, peer):
    work = prefill_work.works(machine)[0]
    rows = {row.stage: row for row in prefill.work_rows(work, machine, BenchOptions(peer=peer))}
    assert rows["attention"].error <= ERROR_BOUND
    assert difference(rows["attention"]) < 1e-3
    assert rows["attention"].dense is not None


def test_cudnn_is_no_other_kernel_under_its_name(machine):
    work = prefill_work.works(machine)[-1]
    with pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"):  # there is none without a GPU
        cudnn_prefill(work, [prefill_work.make_inputs(work, machine)], machine)
    with pytest.raises(ValueError, match="cudnn has no rule but causal, and this is tiny window 4096"):
        cudnn_prefill(prefill_work.works(machine)[0], [], machine)


def difference(row):
    """The largest difference of two answers, as the row tells it."""
    assert row.peer.timing is not None, row.peer.error
    return max(float(text) for text in re.findall(r"[\d.]+e[+-]\d+", row.peer.difference))
