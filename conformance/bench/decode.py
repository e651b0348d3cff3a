"""Suite seed64k: one decode row a request over 264 pages of 16, or 4,224 tokens, of a 64K cache, per KV head."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import Timing, measure

SEQLEN_KV = 65_536
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
CANDIDATES = 4_224  # per KV head: 264 pages of 16
BATCHES = (1, 8, 64)


@dataclass(frozen=True)
class DecodeWork:
    """Inputs of one batch; pages are random and differ by KV head."""

    batch: int
    page_size: int
    k_cache: torch.Tensor  # (num_pages, page_size, num_kv_heads, head_dim)
    v_cache: torch.Tensor
    q: torch.Tensor  # (batch, num_qo_heads, head_dim)
    page_table: torch.Tensor  # (batch, pages of a request)
    chosen: torch.Tensor  # (batch, num_kv_heads, candidates): token positions, or logical pages, ascending
    granularity: str

    @property
    def bytes(self) -> int:
        """Keys and values of every candidate, read once."""
        return self.batch * NUM_KV_HEADS * CANDIDATES * HEAD_DIM * 2 * self.k_cache.element_size()

    @property
    def flops(self) -> int:
        return 4 * self.batch * NUM_QO_HEADS * CANDIDATES * HEAD_DIM

    @property
    def name(self) -> str:
        what = f"{CANDIDATES // self.page_size} pages of {self.page_size}"
        return f"{what if self.granularity == 'block' else f'{CANDIDATES} tokens'} per KV head, batch {self.batch}"


def make_work(batch: int, page_size: int, granularity: str, dtype: torch.dtype) -> DecodeWork:
    """Random data, random pages, random candidates."""
    pages = SEQLEN_KV // page_size
    shape = (batch * pages, page_size, NUM_KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.empty(shape, dtype=dtype, device="cuda").normal_() for _ in range(2))
    ids, count = (pages, CANDIDATES // page_size) if granularity == "block" else (SEQLEN_KV, CANDIDATES)
    scores = torch.rand(batch, NUM_KV_HEADS, ids, device="cuda")
    return DecodeWork(
        batch=batch,
        page_size=page_size,
        k_cache=k_cache,
        v_cache=v_cache,
        q=torch.randn(batch, NUM_QO_HEADS, HEAD_DIM, dtype=dtype, device="cuda"),
        page_table=torch.randperm(batch * pages, device="cuda").view(batch, pages).int(),
        chosen=scores.topk(count, dim=-1).indices.sort(-1).values.int(),
        granularity=granularity,
    )


def our_plan(work: DecodeWork) -> Any:
    """The plan of the bundled kernels, from candidates on the device."""
    from attnconform.kernels import sparse_attention

    lists = work.batch * NUM_KV_HEADS
    per_list = work.chosen.shape[-1]
    return sparse_attention.plan(
        qo_indptr=torch.arange(work.batch + 1, device="cuda"),
        seqlen_kv=torch.full((work.batch,), SEQLEN_KV, device="cuda"),
        page_table=work.page_table,
        page_size=work.page_size,
        num_pages=work.k_cache.shape[0],
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim_qk=HEAD_DIM,
        head_dim_vo=HEAD_DIM,
        sm_scale=1 / math.sqrt(HEAD_DIM),
        dtype=work.q.dtype,
        device="cuda",
        candidates=sparse_attention.CandidateLists(
            granularity=work.granularity,
            block_size=work.page_size if work.granularity == "block" else 1,
            sharing="kv_head",
            q_block_size=1,
            indptr=torch.arange(0, (lists + 1) * per_list, per_list, device="cuda", dtype=torch.int32),
            indices=work.chosen.reshape(-1),
        ),
    )


def our_run(work: DecodeWork) -> tuple[Callable[[], Any], torch.Tensor, torch.Tensor, int]:
    """The launch of a plan made before, its outputs, and its workspace in bytes."""
    from attnconform.kernels import sparse_attention

    plan = our_plan(work)
    out = torch.empty_like(work.q)
    lse = torch.empty(work.q.shape[:2], device="cuda")
    run = sparse_attention.run
    return lambda: run(plan, work.q, work.k_cache, work.v_cache, out=out, lse=lse), out, lse, plan.workspace_bytes


@dataclass(frozen=True)
class FlashInferDecode:
    """FlashInfer's batch decode over the same candidates: KV heads become requests of one head each."""

    wrapper: Any
    indptr: torch.Tensor
    indices: torch.Tensor  # physical page of each (request, KV head), heads outermost in the pool's view
    last_page_len: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    page_size: int
    q: torch.Tensor

    def plan(self) -> None:
        self.wrapper.plan(
            self.indptr, self.indices, self.last_page_len, NUM_QO_HEADS // NUM_KV_HEADS, 1, HEAD_DIM, self.page_size,
            q_data_type=self.q.dtype, kv_data_type=self.q.dtype,
        )  # fmt: skip

    def plan_and_run(self) -> Any:
        self.plan()
        return self.run()

    def run(self) -> Any:
        return self.wrapper.run(self.q, self.caches, return_lse=True)


def flashinfer_decode(work: DecodeWork) -> FlashInferDecode:
    """The same bytes as FlashInfer reads them best: a pool of one-head pages, copied once, outside the timing."""
    import flashinfer

    page_size = work.page_size if work.granularity == "block" else 1
    pool = work.k_cache.shape[0] * work.page_size // page_size
    # (num_pages, page_size, heads, dim) -> pages of one head: (heads * num_pages, 1, page_size, dim), HND
    caches = tuple(
        c.view(pool, page_size, NUM_KV_HEADS, HEAD_DIM).permute(2, 0, 1, 3).reshape(-1, 1, page_size, HEAD_DIM)
        for c in (work.k_cache, work.v_cache)
    )
    requests = torch.arange(work.batch, device="cuda")[:, None, None]
    positions = work.chosen.long() * (work.page_size if work.granularity == "block" else 1)
    slots = work.page_table[requests, positions // work.page_size].long() * work.page_size + positions % work.page_size
    heads = torch.arange(NUM_KV_HEADS, device="cuda")[None, :, None]
    pages = (slots // page_size + heads * pool).int()
    lists, per_list = work.batch * NUM_KV_HEADS, work.chosen.shape[-1]
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    return FlashInferDecode(
        wrapper=flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True),
        indptr=torch.arange(0, (lists + 1) * per_list, per_list, device="cuda", dtype=torch.int32),
        indices=pages.reshape(-1),
        last_page_len=torch.full((lists,), page_size, device="cuda", dtype=torch.int32),
        caches=(caches[0], caches[1]),
        page_size=page_size,
        q=work.q.view(lists, NUM_QO_HEADS // NUM_KV_HEADS, HEAD_DIM),
    )


def our_tier(work: DecodeWork) -> "Tier":
    """A tier of the bundled kernels that takes the work's candidates again and again."""
    from attnconform.kernels.sparse_attention.tier import plan_tier

    tier = plan_tier(
        batch_size=work.batch,
        capacity=CANDIDATES,
        max_seqlen_kv=SEQLEN_KV,
        page_size=work.page_size,
        num_pages=work.k_cache.shape[0],
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim_qk=HEAD_DIM,
        head_dim_vo=HEAD_DIM,
        sm_scale=1 / math.sqrt(HEAD_DIM),
        dtype=work.q.dtype,
        device="cuda",
        granularity=work.granularity,
        block_size=work.page_size if work.granularity == "block" else 1,
    )
    out, lse = torch.empty_like(work.q), torch.empty(work.q.shape[:2], device="cuda")
    per_list = work.chosen.shape[-1]
    lists = work.batch * NUM_KV_HEADS
    indices = {
        "seqlen_kv": torch.full((work.batch,), SEQLEN_KV, device="cuda", dtype=torch.int32),
        "page_table": work.page_table,
        "indptr": torch.arange(0, (lists + 1) * per_list, per_list, device="cuda", dtype=torch.int32),
        "indices": work.chosen.reshape(-1),
    }
    return Tier(tier, work, indices, out, lse)


@dataclass(frozen=True)
class Tier:
    """Index and attention of one tier, as calls."""

    tier: Any
    work: DecodeWork
    indices: dict[str, torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor

    def index(self) -> None:
        self.tier.update(**self.indices)

    def attend(self) -> None:
        from attnconform.kernels.sparse_attention import run

        run(self.tier.plan, self.work.q, self.work.k_cache, self.work.v_cache, out=self.out, lse=self.lse)

    def end_to_end(self) -> None:
        self.index()
        self.attend()


def decode_rows(peer: str | None, batches: tuple[int, ...] = BATCHES) -> Iterator[BenchRow]:
    """Attention, index or plan, and both from candidates, for pages and for tokens."""
    for granularity in ("block", "token"):
        for batch in batches:
            work = make_work(batch, 16, granularity, torch.bfloat16)
            yield from work_rows(work, peer)
            del work
            torch.cuda.empty_cache()


def work_rows(work: DecodeWork, peer: str | None) -> Iterator[BenchRow]:
    """Rows of one batch, each with the peer's same stage."""
    run, out, lse, workspace = our_run(work)
    run()
    tier = our_tier(work)
    tier.end_to_end()
    tier.tier.raise_if_refused()
    ours = {
        "attention": measure(run),
        "attention of a tier": measure(tier.attend),
        "index": measure(tier.index, seconds=0.3),
        "end to end": measure(tier.end_to_end, seconds=0.3),
        "one-off plan": measure(lambda: our_plan(work), seconds=0.2),
    }
    theirs, error, check = peer_times(work, out, lse, tier) if peer == "flashinfer" else ({}, "", "")
    for stage, timing in ours.items():
        yield BenchRow(
            suite="seed64k",
            work=work.name,
            stage=stage,
            ours=timing,
            peer=theirs.get(stage),
            peer_name=peer or "",
            peer_error=error,
            bytes=work.bytes,
            flops=work.flops,
            workspace_bytes=workspace,
            check=check,
        )


def peer_times(
    work: DecodeWork, out: torch.Tensor, lse: torch.Tensor, tier: Tier
) -> tuple[dict[str, Timing], str, str]:
    """FlashInfer's time of each stage, why there is none, and how far the answers are apart."""
    try:
        other = flashinfer_decode(work)
        want, lse_2 = other.plan_and_run()
        want, want_lse = want.view_as(out).float(), lse_2.view_as(lse) * math.log(2)
        gaps = [(want - x.float()).abs().max().item() for x in (out, tier.out)]
        lse_gaps = [(want_lse - x).abs().max().item() for x in (lse, tier.lse)]
        run = measure(other.run)
        plan = measure(other.plan, seconds=0.3)
        times = {
            "attention": run,
            "attention of a tier": run,
            "index": plan,
            "one-off plan": plan,
            "end to end": measure(other.plan_and_run, seconds=0.3),
        }
        return times, "", f"max |difference|: out {max(gaps):.2e}, lse {max(lse_gaps):.2e}"
    except Exception as failure:  # a peer that does not run here is reported, not hidden
        return {}, f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}", ""


def index_rows(peer: str | None) -> Iterator[BenchRow]:
    """Canonicalization alone: 512 lists of 272 unsorted pages with duplicates, against torch operations."""
    work = make_work(64, 16, "block", torch.bfloat16)
    first, again = work.chosen, work.chosen[..., :8]
    shuffled = torch.cat([first, again], dim=-1)[..., torch.randperm(272, device="cuda")].contiguous()
    work = replace(work, chosen=shuffled)
    tier = our_tier(work)
    tier.index()
    tier.tier.raise_if_refused()
    offset = torch.arange(64 * NUM_KV_HEADS, device="cuda")[:, None] * (SEQLEN_KV // 16)

    def torch_operations() -> torch.Tensor:
        ids = torch.unique(shuffled.reshape(-1, 272).long() + offset)
        request = ids // (SEQLEN_KV // 16 * NUM_KV_HEADS)
        return work.page_table[request, ids % (SEQLEN_KV // 16)]

    yield BenchRow(
        suite="index",
        work="512 lists of 272 pages to sorted unique tokens, slots and tasks",
        stage="index",
        ours=measure(tier.index),
        peer=measure(torch_operations, seconds=0.3),
        peer_name="torch ops, pages only",
    )
