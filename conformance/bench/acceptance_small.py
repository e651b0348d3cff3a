"""The parts of the acceptance scenario that enumerate: every edge, every block, every number, at a small length."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.prefill_work import PrefillWork
from attnconform.reference import rules as spec_rules
from attnconform.reference.attention import attention, attention_gradients
from attnconform.reference.blocks.build import Extent, element_mask, rule_block_mask
from attnconform.reference.blocks.statistics import BlockStatistics, block_statistics
from attnconform.reference.cache import PagedCache
from attnconform.reference.problem import AttentionProblem

BLOCK = 8  # of the small block mask
CLOSE = 2e-5  # |ours - want| / |want| in float32


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must hold."""

    name: str
    found: str
    is_met: bool

    @property
    def line(self) -> str:
        return f"{'met' if self.is_met else 'NOT MET'}: {self.name}: {self.found}"


def near(name: str, ours: torch.Tensor, want: torch.Tensor, limit: float = CLOSE) -> Check:
    """Within a share of what is wanted; NaN is never near."""
    error = float((ours.double() - want.double()).norm() / want.double().norm())
    return Check(name=name, found=f"off by {error:.1e} of its size, at most {limit:.0e}", is_met=error <= limit)


def equal(name: str, ours: torch.Tensor, want: torch.Tensor) -> Check:
    """Bit for bit."""
    differing = int((ours != want).sum())
    return Check(name=name, found=f"{differing} of {want.numel()} elements differ", is_met=differing == 0)


def count(name: str, found: int, wanted: int) -> Check:
    return Check(name=name, found=f"{found}, wanted {wanted}", is_met=found == wanted)


def differs(name: str, ours: torch.Tensor, other: torch.Tensor) -> Check:
    """A change that must be seen."""
    changed = int((ours != other).sum())
    return Check(name=name, found=f"{changed} of {other.numel()} elements change", is_met=changed > 0)


def spec_rule(work: PrefillWork) -> spec_rules.MaskRule:
    """The mask in the reference's words."""
    assert work.window is not None
    starts = (tuple(range(0, work.seqlen, work.document_len)),)
    return spec_rules.And((spec_rules.Causal(), spec_rules.Window(left=work.window - 1), spec_rules.Document(starts)))


@dataclass(frozen=True, eq=False)
class Prompt:
    """q, k, v and dout of a work, its pages in an order of their own."""

    work: PrefillWork
    pages: torch.Tensor  # (pages,) of the request
    q: torch.Tensor
    k: torch.Tensor  # (pages, page_size, num_kv_heads, head_dim)
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def draw(cls, work: PrefillWork, machine: Machine) -> "Prompt":
        generator = torch.Generator().manual_seed(0)
        num_pages = -(-work.seqlen // work.page_size)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(machine.device, work.dtype)

        rows = (work.seqlen, work.num_qo_heads, work.head_dim)
        cache = (num_pages, work.page_size, work.num_kv_heads, work.head_dim)
        pages = torch.arange(num_pages, device=machine.device)
        return cls(work, pages, normal(*rows), normal(*cache), normal(*cache), normal(*rows))

    def shuffled(self) -> "Prompt":
        """The same tokens on other pages."""
        order = torch.randperm(len(self.pages), generator=torch.Generator().manual_seed(1)).to(self.pages.device)
        k, v = torch.empty_like(self.k), torch.empty_like(self.v)
        k[order], v[order] = self.k, self.v
        return replace(self, pages=order, k=k, v=v)

    def plan(self, *, first: int = 0, past: int | None = None, **options: Any) -> Any:
        """Of rows first to past, the cache holding what lies before past."""
        from attnconform.kernels import sparse_attention

        w, past = self.work, self.work.seqlen if past is None else past
        return sparse_attention.plan(
            qo_indptr=[0, past - first], seqlen_kv=[past], page_table=self.pages.int()[None], page_size=w.page_size,
            num_pages=len(self.pages), num_qo_heads=w.num_qo_heads, num_kv_heads=w.num_kv_heads,
            head_dim_qk=w.head_dim, head_dim_vo=w.head_dim, sm_scale=w.head_dim**-0.5, dtype=w.dtype,
            device=self.q.device, **{"mask_rule": w.mask_rule(), **options},
        )  # fmt: skip

    def run(self, plan: Any, *, first: int = 0, past: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        from attnconform.kernels import sparse_attention

        out, lse = sparse_attention.run(plan, self.q[first:past], self.k, self.v)
        return out, lse

    def by_slot(self, x: torch.Tensor) -> Any:
        return x.double().cpu().numpy().reshape(-1, *x.shape[-2:])


def adjacency_checks(work: PrefillWork, machine: Machine) -> Iterator[Check]:
    """What the plan's intervals allow, edge by edge, against the rule."""
    plan = Prompt.draw(work, machine).plan()
    kv_idx = np.arange(work.seqlen)
    starts, ends = (bound[0].cpu().numpy()[:, None] for bound in (plan.mask_starts, plan.mask_ends))
    ours = (kv_idx >= starts) & (kv_idx < ends)
    want = element_mask(spec_rule(work), extent_of(work, BLOCK))[0]
    document = kv_idx // work.document_len
    across = ours & (document[:, None] != document)
    yield count("edges that differ from the rule", int((ours != want).sum()), 0)
    yield count("edges between documents", int(across.sum()), 0)
    yield count("edges of one head", int(ours.sum()), work.edges)


def extent_of(work: PrefillWork, block: int) -> Extent:
    return Extent(seqlen_q=work.seqlen, seqlen_kv=work.seqlen, q_block_size=block, kv_block_size=block)


def statistics_of(work: PrefillWork, block: int) -> BlockStatistics:
    """Figures of the block mask that stands for the rule."""
    return block_statistics(rule_block_mask(spec_rule(work), extent_of(work, block)), num_edges=work.edges)


def describe_statistics(found: BlockStatistics) -> str:
    listed = max(1, found.num_full + found.num_partial)
    return (
        f"mean {found.row_mean:.2f}, P50 {found.row_p50}, P95 {found.row_p95}, max {found.row_max} blocks a block of "
        f"rows; {found.num_full} full, {found.num_partial} partial ({found.num_partial / listed:.0%}), "
        f"{found.num_empty} empty; {found.amplification:.2f} elements an edge"
    )


def statistics_checks(work: PrefillWork, machine: Machine) -> Iterator[Check]:
    """Kinds of blocks, counted from the elements once more."""
    found = statistics_of(work, BLOCK)
    elements = element_mask(spec_rule(work), extent_of(work, BLOCK))[0]
    size = -(-work.seqlen // BLOCK)
    padded = np.zeros((size * BLOCK, size * BLOCK), dtype=bool)
    padded[: work.seqlen, : work.seqlen] = elements
    per_block = padded.reshape(size, BLOCK, size, BLOCK).sum((1, 3))
    real = np.minimum(BLOCK, work.seqlen - BLOCK * np.arange(size))
    is_full = per_block == real[:, None] * real
    wanted = (int(is_full.sum()), int(((per_block > 0) & ~is_full).sum()), int((per_block == 0).sum()))
    got = (found.num_full, found.num_partial, found.num_empty)
    yield Check(name="full, partial and empty blocks", found=f"{describe_statistics(found)}", is_met=got == wanted)


def number_checks(work: PrefillWork, machine: Machine) -> Iterator[Check]:
    """out, lse and every gradient in every mode, against float64; and without the block lists, which change nothing."""
    from attnconform.kernels.sparse_attention import BackwardHints, backward, plan_backward
    from attnconform.kernels.sparse_attention.backward_hints import MODES

    prompt = Prompt.draw(work, machine)
    plan = prompt.plan()
    out, lse = prompt.run(plan)
    problem = problem_of(prompt)
    numbers = (prompt.by_slot(prompt.q), prompt.by_slot(prompt.k), prompt.by_slot(prompt.v))
    want = attention(problem, *numbers)
    yield near("out against float64", out.cpu(), torch.from_numpy(want.out))
    yield near("lse against float64", lse.cpu(), torch.from_numpy(want.lse))
    gradients = attention_gradients(problem, *numbers, prompt.by_slot(prompt.dout))
    dk, dv = gradients.in_pool(problem.cache.num_slots)
    for mode in MODES:
        work_of_mode = plan_backward(plan, BackwardHints(mode=mode, reuse_threshold=2))
        got = backward(plan, prompt.q, prompt.k, prompt.v, out, lse, prompt.dout, work=work_of_mode)
        for name, ours, theirs in (("dq", got.dq, gradients.dq), ("dk", got.dk, dk), ("dv", got.dv, dv)):
            yield near(f"{name} {mode} against float64", ours.cpu().flatten(), torch.from_numpy(theirs).flatten())
    listed, _ = prompt.run(prompt.plan(candidates=listed_blocks(prompt)))
    yield near("out over listed blocks with the same rule", listed, out)


def problem_of(prompt: Prompt) -> AttentionProblem:
    """The prompt as the reference takes it."""
    w = prompt.work
    table = prompt.pages.cpu().numpy()[None]
    return AttentionProblem(
        qo_indptr=np.array([0, w.seqlen]), seqlen_kv=np.array([w.seqlen]), q_offset=np.array([0]),
        num_qo_heads=w.num_qo_heads, num_kv_heads=w.num_kv_heads, head_dim_qk=w.head_dim, head_dim_vo=w.head_dim,
        cache=PagedCache(page_size=w.page_size, num_pages=len(prompt.pages), page_table=table),
        sm_scale=w.head_dim**-0.5, mask_rule=spec_rule(w),
    )  # fmt: skip


def listed_blocks(prompt: Prompt) -> Any:
    """The blocks that the rule touches, full and partial, as candidate lists."""
    from attnconform.kernels.sparse_attention import CandidateLists

    mask = rule_block_mask(spec_rule(prompt.work), extent_of(prompt.work, BLOCK))
    rows = [sorted([*mask.full.of(r).tolist(), *mask.partial.of(r).tolist()]) for r in range(mask.num_rows)]
    return CandidateLists(
        granularity="block", block_size=BLOCK, q_block_size=BLOCK, sharing="shared",
        indptr=torch.tensor([0, *map(len, rows)], device=prompt.q.device).cumsum(0),
        indices=torch.tensor([kv for row in rows for kv in row], device=prompt.q.device),
    )  # fmt: skip


def reuse_checks(work: PrefillWork, machine: Machine) -> Iterator[Check]:
    """A plan made again gives the same bits, other boundaries another answer, and another bias needs no new plan.

    Slopes of 0 are another program: 0 is added to each score, and it may round where the other fuses, so that no clause
    owes its bits.
    """
    from attnconform.kernels.sparse_attention import sparse_attention
    from attnconform.kernels.sparse_attention.rules import Alibi

    prompt = Prompt.draw(work, machine)
    plan = prompt.plan()
    out, _ = prompt.run(plan)
    yield equal("a plan used again", prompt.run(plan)[0], out)
    yield equal("a plan made again", prompt.run(prompt.plan())[0], out)
    moved = replace(work, document_len=work.document_len - 4)
    other, _ = prompt.run(replace(prompt, work=moved).plan())
    yield differs("documents with other boundaries and the same length", other, out)
    slopes = torch.tensor(work.slopes(), device=prompt.q.device)
    biased = prompt.plan(score_rules=[Alibi((0.0,) * work.num_qo_heads)])
    inputs = (prompt.q, prompt.k, prompt.v)
    yield near("slopes of 0 against no bias", prompt.run(biased)[0], out)
    rebuilt, _ = prompt.run(prompt.plan(score_rules=[Alibi(tuple(work.slopes()))]))
    yield equal("a new bias in an old plan", sparse_attention(biased, *inputs, score_params=[slopes])[0], rebuilt)


def training_checks(work: PrefillWork, machine: Machine) -> Iterator[Check]:
    """Grouped heads against a copy of K and V for each, and gradients of a region that is run twice."""
    from attnconform.kernels.sparse_attention import sparse_attention

    prompt = Prompt.draw(work, machine)
    plan = prompt.plan()
    out, _ = prompt.run(plan)
    group = work.num_qo_heads // work.num_kv_heads
    copied = replace(
        prompt,
        work=replace(work, num_kv_heads=work.num_qo_heads),
        k=prompt.k.repeat_interleave(group, 2),
        v=prompt.v.repeat_interleave(group, 2),
    )
    yield near("grouped heads against copied ones", copied.run(copied.plan())[0], out)

    def attend(*leaves: torch.Tensor) -> torch.Tensor:
        return sparse_attention(plan, *leaves)[0]

    leaves = [x.clone().requires_grad_() for x in (prompt.q, prompt.k, prompt.v)]
    plain = torch.autograd.grad(attend(*leaves), leaves, prompt.dout)
    again = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False), leaves, prompt.dout)
    for name, ours, want in zip(("dq", "dk", "dv"), again, plain, strict=True):
        yield equal(f"{name} of a checkpointed region", ours, want)


def serving_checks(work: PrefillWork, machine: Machine) -> Iterator[Check]:
    """The same rule in chunks, token by token, and over shuffled pages."""
    prompt = Prompt.draw(work, machine)
    out, lse = prompt.run(prompt.plan())
    half = work.seqlen // 2 + 1
    chunks = [prompt.run(prompt.plan(first=a, past=b), first=a, past=b)[0] for a, b in ((0, half), (half, work.seqlen))]
    yield near("prefill in two chunks", torch.cat(chunks), out)
    # Around the first boundary of documents, and the last token.
    rows = [*range(work.document_len - 2, work.document_len + 2), work.seqlen - 1]
    steps = [prompt.run(prompt.plan(first=row, past=row + 1), first=row, past=row + 1) for row in rows]
    yield near("decode, out", torch.cat([step[0] for step in steps]), out[rows])
    yield near("decode, lse", torch.cat([step[1] for step in steps]), lse[rows])
    other = prompt.shuffled()
    yield equal("shuffled pages, prefill", other.run(other.plan())[0], out)
    row = work.seqlen - 1
    decoded, _ = other.run(other.plan(first=row), first=row)
    yield equal("shuffled pages, decode", decoded, steps[-1][0])
