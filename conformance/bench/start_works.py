"""What suite starts calls: works that launch every bundled kernel, changes of their numbers, and one of their code.

A change makes everything anew, as the next step of a server does: other lengths, other candidates, another batch. Only
what is compiled in stays: heads, dims, dtypes, page and block sizes, the kinds of rules, a tier's capacity.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from attnconform.conformance.bench.backward_parts import OurBackward
from attnconform.conformance.bench.backward_subjects import (
    TINY_HOT,
    HotShape,
    Subject,
    blocks_per_token,
    hot_pages,
    prompt,
)
from attnconform.conformance.bench.block_mask import our_block_mask
from attnconform.conformance.bench.block_sparse_work import TINY_BLOCKS, BlockSparseShape, block_plan, make_blocks
from attnconform.conformance.bench.bundled import PlanRun, TierRun
from attnconform.conformance.bench.decode_work import TINY, DecodeShape, DecodeWork, draw_lists, make_work
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.nsa_work import NsaShape, make_nsa, nsa_plan
from attnconform.conformance.bench.nsa_work import shapes as nsa_shapes
from attnconform.conformance.bench.peers.flex import BLOCK
from attnconform.conformance.bench.prefill import OurPrefill
from attnconform.conformance.bench.prefill_work import PrefillWork, make_inputs, works
from attnconform.conformance.bench.quant import make_quantized
from attnconform.conformance.bench.timing import Call

Make = Callable[[], Call]


@dataclass(frozen=True)
class StartWork:
    """Makes inputs and a plan, and gives the call that is timed."""

    make: Make
    changed: dict[str, Make] = field(default_factory=dict)  # numbers alone: nothing may be compiled
    other_code: Make | None = None  # something that is compiled in: something must be


def decode_shape(machine: Machine) -> DecodeShape:
    return DecodeShape(batch=8) if machine.is_real else TINY


def shorter(shape: DecodeShape) -> DecodeShape:
    """Requests of another length, with fewer candidates each."""
    pages = shape.pages * 3 // 4
    return replace(
        shape,
        seqlen_kv=pages * shape.page_size,
        candidates=shape.candidates // shape.block_size // 2 * shape.block_size,
    )


def decode_plan(machine: Machine) -> StartWork:
    """A plan of one step, by pages."""
    shape = decode_shape(machine)

    def make(shape: DecodeShape) -> Call:
        return PlanRun.sparse(make_work(shape, machine))

    return StartWork(
        partial(make, shape),
        {
            "lengths and candidates": partial(make, shorter(shape)),
            "batch": partial(make, shape),
        },
        partial(make, replace(shape, page_size=2 * shape.page_size)),
    )


def tier(granularity: Any, machine: Machine) -> StartWork:
    """Index and attention of one tier, whose steps differ in lengths, candidates, pages and queries."""
    shape = replace(decode_shape(machine), granularity=granularity)
    work = make_work(shape, machine)
    ours = TierRun(work, capacity=shape.candidates)

    def step(work: DecodeWork, seqlen_kv: int) -> Call:
        """Tensors of its own, so that kernels are launched and no graph is replayed."""
        lengths = torch.full_like(ours.seqlen_kv, seqlen_kv)

        def call() -> None:
            ours.tier.update(seqlen_kv=lengths, page_table=work.page_table, indptr=work.indptr, indices=work.indices)
            ours.attend(work)
            ours.tier.raise_if_refused()

        return call

    def other(drawn: DecodeShape, seqlen_kv: int) -> Call:
        indptr, indices = draw_lists(drawn, machine.device)
        return step(replace(work, indptr=indptr, indices=indices), seqlen_kv)

    def other_tier() -> Call:
        changed = make_work(replace(shape, page_size=2 * shape.page_size), machine)
        one = TierRun(changed, capacity=shape.candidates)
        return partial(one.from_candidates, changed)

    less = shorter(shape)
    moved = replace(work, page_table=work.page_table.flip(1).contiguous(), q=torch.randn_like(work.q))
    return StartWork(
        lambda: step(work, shape.seqlen_kv),
        {
            "lengths": lambda: other(replace(shape, seqlen_kv=less.seqlen_kv), less.seqlen_kv),
            "candidates": lambda: other(replace(shape, candidates=less.candidates), shape.seqlen_kv),
            "batch": lambda: step(moved, shape.seqlen_kv),
        },
        other_tier,
    )


def float8_plan(machine: Machine) -> StartWork:
    """Decode from codes."""
    shape = decode_shape(machine)

    def make(shape: DecodeShape, form: str) -> Call:
        return make_quantized(make_work(shape, machine), form, "tensor").run

    return StartWork(
        partial(make, shape, "float8_e4m3"),
        {"lengths and candidates": partial(make, shorter(shape), "float8_e4m3")},
        partial(make, shape, "int8"),
    )


def gathered(machine: Machine) -> StartWork:
    """A copy of what is listed, and attention over it."""
    from attnconform.kernels.sparse_attention.gather import ReuseKey, plan_gather

    def make(shape: DecodeShape) -> Call:
        run = PlanRun.sparse(make_work(shape, machine))
        copy, work = plan_gather(run.plan), run.work
        key = ReuseKey(candidates=0, order="position", dtype=work.q.dtype, position_transform="none", cache_version=0)
        return lambda: copy.run(work.q, work.k_cache, work.v_cache, key=key, out=run.out, lse=run.lse)

    shape = decode_shape(machine)
    return StartWork(partial(make, shape), {"lengths and candidates": partial(make, shorter(shape))})


def merged(machine: Machine) -> StartWork:
    """Two results over disjoint keys made one."""
    from attnconform.kernels.sparse_attention import merge_states

    shape = decode_shape(machine)

    def make(rows: int) -> Call:
        sizes = (rows, shape.num_qo_heads)
        out, lse = (torch.randn(*sizes, *dims, device=machine.device) for dims in ((shape.head_dim,), ()))
        return lambda: merge_states(out, lse, out.clone(), lse.clone())

    return StartWork(partial(make, 2 * shape.batch), {"rows": partial(make, 2 * shape.batch + 1)})


def prompt_forward(number: int, machine: Machine) -> StartWork:
    """One of suite prefill's prompts."""
    work = works(machine)[number]

    def make(work: PrefillWork) -> Call:
        return OurPrefill(work, make_inputs(work, machine)).run

    return StartWork(partial(make, work), {"lengths and rules' numbers": partial(make, other_prompt(work))})


def other_prompt(work: PrefillWork) -> PrefillWork:
    """Of another length, with other numbers in its rules."""
    return replace(
        work, seqlen=work.seqlen - work.page_size, document_len=work.document_len - 3,
        window=None if work.window is None else work.window - 5,
        soft_cap=None if work.soft_cap is None else work.soft_cap + 1,
    )  # fmt: skip


def nsa_forward(number: int, machine: Machine, **hints: Any) -> StartWork:
    """Lists of every token."""
    shape = nsa_shapes(machine)[number]

    def make(shape: NsaShape) -> Call:
        work = make_nsa(shape, machine.device)
        return partial(run_plan, nsa_plan(work, **hints), work.q, work.k, work.v)

    shorter_prompt = replace(shape, seqlen=shape.seqlen - shape.block_size)
    return StartWork(
        partial(make, shape), {"candidates": partial(make, shape), "lengths": partial(make, shorter_prompt)}
    )


def unions(machine: Machine) -> StartWork:
    """Rows with lists of their own that share tiles, without the kernel of one architecture."""
    from attnconform.kernels.sparse_attention.tuning import Choice

    return nsa_forward(1, machine, rows_per_union=4, choice=Choice(forward="plain"))


def blocks_forward(machine: Machine, **hints: Any) -> StartWork:
    """Chosen blocks of a prompt."""
    shape = BlockSparseShape() if machine.is_real else replace(TINY_BLOCKS, seqlen=96, block_size=32)

    def make(shape: BlockSparseShape) -> Call:
        work = make_blocks(shape, machine)
        return partial(run_plan, block_plan(work, **hints), *work.inputs)

    shorter_prompt = replace(shape, seqlen=shape.seqlen - shape.block_size)
    return StartWork(
        partial(make, shape), {"candidates": partial(make, shape), "lengths": partial(make, shorter_prompt)}
    )


def run_plan(plan: Any, *tensors: torch.Tensor) -> None:
    from attnconform.kernels.sparse_attention import run

    run(plan, *tensors)


def rule_mask(machine: Machine) -> StartWork:
    """Block structure from a rule."""
    work = next(w for w in works(machine) if w.documents)
    return StartWork(
        lambda: partial(our_block_mask, work, machine),
        {"lengths and the rule's numbers": lambda: partial(our_block_mask, other_prompt(work), machine)},
    )


def dense_mask(machine: Machine) -> StartWork:
    """Block structure from elements, and that of the transposed mask."""
    from attnconform.kernels.sparse_attention.block_mask import block_mask_of, transpose_block_mask

    def make(length: int) -> Call:
        mask = torch.rand(1, length, length, device=machine.device) < 0.01
        return lambda: transpose_block_mask(block_mask_of(mask, q_block_size=BLOCK, kv_block_size=BLOCK))

    # a stride may be compiled in, by whether vectors fit into it: lengths here are of one kind
    return StartWork(partial(make, 4 * BLOCK), {"lengths": partial(make, 3 * BLOCK - 16)})


def members(machine: Machine) -> StartWork:
    """Blocks around listed tokens, with the tokens' bitmaps."""
    from attnconform.kernels.sparse_attention.block_members import expand_to_blocks

    def make(rows: int, per_row: int) -> Call:
        indptr = torch.arange(0, rows * per_row + 1, per_row, device=machine.device)
        positions = torch.randint(512, (rows * per_row,), device=machine.device, dtype=torch.int32)
        sizes = {"block_size": 16, "q_block_size": 4, "max_seqlen_kv": 512, "capacity": 32}
        return lambda: expand_to_blocks(indptr, positions, **sizes)

    return StartWork(partial(make, 8, 24), {"candidates": partial(make, 8, 9), "lengths": partial(make, 5, 24)})


def edges(machine: Machine) -> StartWork:
    """What a rule of the caller's allows and what dropout keeps, element by element."""
    from attnconform.conformance.bench.custom_rule import is_even
    from attnconform.kernels.sparse_attention import Dropout
    from attnconform.kernels.sparse_attention.edge_masks import allowed_edges, kept_edges
    from attnconform.kernels.sparse_attention.rules import Custom

    def make(length: int) -> Call:
        q_idx = torch.arange(length, device=machine.device)

        def call() -> None:
            allowed_edges(Custom(is_even), 0, 2, q_idx, length)
            kept_edges(Dropout(0.5, 7), 0, 2, q_idx, length)

        return call

    return StartWork(partial(make, 64), {"lengths": partial(make, 37)})


def backward(mode: Any, subject: str, machine: Machine, **hints: Any) -> StartWork:
    """One mode of the backward, and the forward before it."""
    from attnconform.kernels.sparse_attention.backward_hints import BackwardHints

    one, other = backward_subjects(subject, machine)

    def make(made: Callable[[], Subject]) -> Call:
        return OurBackward(made(), BackwardHints(mode=mode, **hints)).run

    return StartWork(partial(make, one), {"lengths": partial(make, other)})


def backward_subjects(subject: str, machine: Machine) -> tuple[Callable[[], Subject], Callable[[], Subject]]:
    """A subject, and one of its kind with other numbers."""
    if subject == "prompt":
        work = works(machine)[0]
        return partial(prompt, work, machine), partial(prompt, other_prompt(work), machine)
    if subject == "lists":
        shape = nsa_shapes(machine)[0]
        shorter_prompt = replace(shape, seqlen=shape.seqlen - shape.block_size)
        return partial(blocks_per_token, shape, machine), partial(blocks_per_token, shorter_prompt, machine)
    hot = HotShape() if machine.is_real else replace(TINY_HOT, rows=20)
    return partial(hot_pages, machine, hot), partial(hot_pages, machine, replace(hot, rows=hot.rows - 1))


def score_gradients(machine: Machine) -> StartWork:
    """Gradients of the numbers of a score rule too."""
    from attnconform.kernels.sparse_attention import backward as differentiate

    work = next(w for w in works(machine) if w.alibi)

    def make(work: PrefillWork) -> Call:
        one = prompt(work, machine)
        return lambda: differentiate(one.plan, *one.saved, score_gradients=True)

    return StartWork(partial(make, work), {"lengths and rules' numbers": partial(make, other_prompt(work))})


CUT: dict[str, Any] = {"rows_per_item": 16, "steps_per_task": 1}  # so that sums of parts follow
WORKS: dict[str, Callable[[Machine], StartWork]] = {
    "decode plan": decode_plan,
    "decode tier, pages": partial(tier, "block"),
    "decode tier, tokens": partial(tier, "token"),
    "decode plan, float8": float8_plan,
    "decode plan, gathered": gathered,
    "merge of two results": merged,
    "prompt, window": partial(prompt_forward, 0),
    "prompt, documents": partial(prompt_forward, 1),
    "prompt, ALiBi": partial(prompt_forward, 2),
    "prompt, soft cap": partial(prompt_forward, 3),
    "prompt, causal": partial(prompt_forward, 4),
    "lists per token, random": partial(nsa_forward, 0),
    "lists per token, kept": partial(nsa_forward, 1),
    "lists per token, unions": unions,
    "chosen blocks": blocks_forward,
    "chosen blocks, cut": partial(blocks_forward, num_kv_splits=2),
    "block mask of a rule": rule_mask,
    "block mask of elements": dense_mask,
    "blocks of listed tokens": members,
    "masks of elements": edges,
    "backward kv_centric, prompt": partial(backward, "kv_centric", "prompt"),
    "backward kv_centric, lists": partial(backward, "kv_centric", "lists"),
    "backward hybrid, hot pages": partial(backward, "hybrid", "hot pages"),
    "backward kv_centric, cut": partial(backward, "kv_centric", "hot pages", **CUT),
    "backward atomic, hot pages": partial(backward, "atomic", "hot pages"),
    "backward of a rule's numbers": score_gradients,
}
