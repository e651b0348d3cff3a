"""Suites on tiny shapes in the interpreter: their answers, their peers and their figures; never their times."""

import pytest
import torch

from attnconform.conformance.bench import decode, index, nsa, quant
from attnconform.conformance.bench.decode_work import TINY, make_sets, make_work
from attnconform.conformance.bench.honesty import ERROR_BOUND
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.selector import Selector


@pytest.fixture(scope="module")
def decode_rows(machine):
    sets = make_sets(make_work(TINY, machine), machine, count=2)
    return {row.stage: row for row in decode.bundled_rows(sets, machine, BenchOptions(peer="sdpa"))}


def test_a_step_has_its_stages_apart_and_together(decode_rows):
    wanted = {"route", "top-k", "index", "one-off plan", "attention", "launch", "from candidates", "end to end"}
    assert wanted <= decode_rows.keys()


def test_the_attention_that_was_timed_is_right_and_reads_only_its_lists(decode_rows):
    row = decode_rows["attention"]
    assert row.error <= ERROR_BOUND
    assert row.poisoned_error <= ERROR_BOUND


def test_the_peers_answer_is_ours(decode_rows):
    peer = decode_rows["attention"].peer
    assert peer.timing is not None, peer.error
    assert float(peer.difference.split()[-1]) < 1e-3


def test_figures_of_a_decode_batch_are_counted(decode_rows):
    figures = decode_rows["attention"].figures
    keys = TINY.num_lists * TINY.candidates
    assert figures.flops_useful == 4 * keys * TINY.group_size * TINY.head_dim
    assert figures.row_lengths.max == TINY.candidates
    assert figures.flops_executed >= figures.flops_useful
    assert figures.workspace_reserved > figures.workspace_used
    assert sum(b.programs for b in figures.program_histogram) == figures.programs


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
    work = make_work(TINY, machine)
    row = quant.quant_row(work, quant.reference_output(work), form, granularity, machine, BenchOptions(seconds=0.1))
    assert row.error <= ERROR_BOUND
    assert row.figures.bytes_ideal < work.bytes


def test_nsa_rows_see_their_own_causal_part_of_their_blocks(machine):
    row = next(nsa.nsa_rows(machine, BenchOptions()))
    assert row.error <= ERROR_BOUND
    assert row.phase == "prefill"
