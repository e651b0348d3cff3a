"""Suite seed64k: one decode row a request over 264 pages of 16, or 4,224 tokens, of a 64K cache, per KV head."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import measure

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


def decode_rows(peer: str | None, batches: tuple[int, ...] = BATCHES) -> Iterator[BenchRow]:
    """Attention alone, plan alone, and both from candidates, for pages and for tokens."""
    for granularity in ("block", "token"):
        for batch in batches:
            work = make_work(batch, 16, granularity, torch.bfloat16)
            yield from work_rows(work, peer)
            del work
            torch.cuda.empty_cache()


def work_rows(work: DecodeWork, peer: str | None) -> Iterator[BenchRow]:
    """Rows of one batch, each with the peer's same stage."""
    run, out, lse, workspace = our_run(work)
    ours = measure(run)
    times: dict[str, Any] = {}
    error, check = "", ""
    if peer == "flashinfer":
        try:
            other = flashinfer_decode(work)
            other.plan()
            want, lse_2 = other.run()
            gap = (want.view_as(out).float() - out.float()).abs().max()
            lse_gap = (lse_2.view_as(lse) * math.log(2) - lse).abs().max()
            check = f"max |difference|: out {gap:.2e}, lse {lse_gap:.2e}"
            times = {
                "attention": measure(other.run),
                "plan": measure(other.plan, seconds=0.3),
                "end to end": measure(other.plan_and_run, seconds=0.3),
            }
        except Exception as failure:  # a peer that does not run here is reported, not hidden
            error = f"{type(failure).__name__}: {str(failure).splitlines()[0][:200]}" if str(failure) else repr(failure)

    def row(stage: str, timing: Any) -> BenchRow:
        return BenchRow(
            suite="seed64k",
            work=work.name,
            stage=stage,
            ours=timing,
            peer=times.get(stage),
            peer_name=peer or "",
            peer_error=error,
            bytes=work.bytes,
            flops=work.flops,
            workspace_bytes=workspace,
            check=check,
        )

    yield row("attention", ours)
    yield row("plan", measure(lambda: our_plan(work), seconds=0.3))
    yield row("end to end", measure(lambda: our_end_to_end(work), seconds=0.3))


def our_end_to_end(work: DecodeWork) -> None:
    """From candidates to output: index, plan and attention."""
    our_run(work)[0]()
