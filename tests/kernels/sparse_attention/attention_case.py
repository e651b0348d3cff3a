"""One attention call with numbers, its float64 oracle written from the contract, and both held against each other."""

import math
import os
from dataclasses import dataclass, field

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

from attnconform.kernels.sparse_attention import CandidateLists, Dropout, KVQuantization, plan, run
from attnconform.kernels.sparse_attention.rules import (
    Alibi,
    And,
    Causal,
    Custom,
    Document,
    HeadWindow,
    MaskRule,
    Or,
    PrefixLM,
    RelativeBias,
    ScoreRule,
    Window,
)
from attnconform.reference.philox import philox4x32

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LARGE = 1e4


@dataclass
class Case:
    """One call, with numbers; `entries[n][b][l]` is the list of request n, row block b, head list l as given."""

    seqlen_q: tuple[int, ...] = (3, 0, 1, 5)
    seqlen_kv: tuple[int, ...] = (27, 0, 18, 3)  # the last request has more rows than keys
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim_qk: int = 64
    head_dim_vo: int = 64
    page_size: int = 8
    dtype: torch.dtype = torch.float32
    layout: str = "NHD"
    sharing: str | None = None
    block_size: int | None = None  # None: token granularity
    q_block_size: int = 1
    window: int | None = None
    num_sink_tokens: int = 0
    mask_rule: MaskRule | None = None
    score_rules: tuple[ScoreRule, ...] = ()
    sink_logits: tuple[float, ...] | None = None
    q_offset: tuple[int, ...] | None = None
    num_kv_splits: int | None = None
    tile_kv: int = 16
    k_quant: KVQuantization | None = None
    v_quant: KVQuantization | None = None
    dropout: Dropout | None = None
    seed: int = 0
    entries: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch_size = len(self.seqlen_q)
        self.group_size = self.num_qo_heads // self.num_kv_heads
        self.qo_indptr = np.concatenate([[0], np.cumsum(self.seqlen_q)])
        self.offsets = self.q_offset or tuple(kv - q for q, kv in zip(self.seqlen_q, self.seqlen_kv, strict=True))
        self.num_lists = {"query_head": self.num_qo_heads, "kv_head": self.num_kv_heads}.get(self.sharing or "", 1)
        rng = np.random.default_rng(self.seed)
        used = [-(-n // self.page_size) for n in self.seqlen_kv]
        self.num_pages = sum(used) + 3
        order = rng.permutation(self.num_pages)
        self.page_table = np.full((self.batch_size, max(used) + 1), -1, dtype=np.int32)
        for n, count in enumerate(used):
            self.page_table[n, :count], order = order[:count], order[count:]
        shape = (self.num_pages * self.page_size, self.num_kv_heads)
        self.q = self._draw(rng, (self.qo_indptr[-1], self.num_qo_heads, self.head_dim_qk))
        # (slots, num_kv_heads, head_dim), whatever the layout; codes where quantized
        self.k, self.k_scale = self._draw_cache(rng, (*shape, self.head_dim_qk), self.k_quant)
        self.v, self.v_scale = self._draw_cache(rng, (*shape, self.head_dim_vo), self.v_quant)
        if self.sharing and not self.entries:
            self.entries = [self._draw_entries(rng, n) for n in range(self.batch_size)]

    def _draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(self.dtype)

    def _draw_cache(
        self, rng: np.random.Generator, shape: tuple[int, ...], quant: KVQuantization | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Numbers, or codes and scales that make numbers of size 1; scales differ by a factor of up to 50."""
        if quant is None:
            return self._draw(rng, shape), None
        numbers = torch.from_numpy(rng.standard_normal(shape) * 40)
        codes = numbers.round().clamp(-128, 127).to(torch.int8) if quant.format == "int8" else numbers.to(quant.dtype)
        slots, heads, head_dim = shape
        sizes = {
            "tensor": (1,),
            "head": (heads,),
            "page": (slots // self.page_size, heads),
            "token": (slots, heads),
            "channel": (heads, head_dim),
        }[quant.granularity]
        return codes, torch.from_numpy(np.exp(rng.uniform(-2, 2, sizes)) / 40).float()

    def dequantized(self, codes: torch.Tensor, scale: torch.Tensor | None, quant: KVQuantization | None) -> np.ndarray:
        """code * scale in float64, (slots, num_kv_heads, head_dim)."""
        numbers = codes.float().double().numpy()
        if quant is None:
            return numbers
        factor = scale.double().numpy()
        if quant.granularity == "page":
            factor = np.repeat(factor, self.page_size, axis=0)
        return numbers * {"head": factor[..., None], "page": factor[..., None], "token": factor[..., None]}.get(
            quant.granularity, factor
        )

    def keep_weights(self, n: int, head: int, q_idx: int, kv_idx: np.ndarray) -> np.ndarray:
        """What every edge weighs under dropout, by the contract's words."""
        if self.dropout is None:
            return np.ones(len(kv_idx))
        counter = np.array([[n, head, q_idx & 0xFFFFFFFF, j] for j in kv_idx], dtype=np.uint32).reshape(-1, 4)
        word = philox4x32(counter, (self.dropout.seed & 0xFFFFFFFF, self.dropout.seed >> 32))[:, 0]
        is_kept = word >= math.floor(self.dropout.rate * 2**32)
        return is_kept / (1 - self.dropout.rate)

    def _draw_entries(self, rng: np.random.Generator, n: int) -> list:
        """Lists with holes and duplicates in random order; some are empty."""
        num_ids = -(-self.seqlen_kv[n] // (self.block_size or 1))
        blocks = -(-self.seqlen_q[n] // self.q_block_size)
        lists = []
        for _ in range(blocks * self.num_lists):
            count = int(rng.integers(0, num_ids + 1)) if rng.random() < 0.8 else 0
            drawn = rng.integers(0, max(1, num_ids), size=2 * count)
            lists.append(np.where(rng.random(drawn.size) < 0.3, -1, drawn).tolist())
        return [lists[b * self.num_lists : (b + 1) * self.num_lists] for b in range(blocks)]

    def slots(self, n: int) -> np.ndarray:
        t = np.arange(self.seqlen_kv[n])
        return self.page_table[n, t // self.page_size].astype(np.int64) * self.page_size + t % self.page_size

    def selected(self, n: int, row: int, head: int) -> np.ndarray:
        """E of one row and head, by the contract's own words."""
        i, length = self.offsets[n] + row, self.seqlen_kv[n]
        chosen = set(range(length))
        if self.sharing:
            list_head = {"query_head": head, "kv_head": head // self.group_size, "shared": 0}[self.sharing]
            ids = [e for e in self.entries[n][row // self.q_block_size][list_head] if e != -1]
            size = self.block_size or 1
            chosen = {e * size + t for e in ids for t in range(size)} & set(range(length))
            chosen |= {j for j in range(length) if 0 <= i - j < (self.window or 0)}
            chosen |= set(range(min(self.num_sink_tokens, length)))
        return np.array(sorted(j for j in chosen if allows(self.mask_rule, n, i, j, head)), dtype=np.int64)


def allows(rule: MaskRule | None, n: int, i: int, j: int, head: int = 0) -> bool:
    match rule:
        case HeadWindow(left, right):
            return allows(Window(left[head], right[head]), n, i, j)
        case None:
            return True
        case Causal():
            return j <= i
        case Window(left, right):
            return (left is None or i - j <= left) and (right is None or j - i <= right)
        case PrefixLM(prefix_len):
            return j < prefix_len[n] or j <= i
        case Document(starts):
            return sum(s <= i for s in starts[n]) == sum(s <= j for s in starts[n])
        case And(rules):
            return all(allows(r, n, i, j, head) for r in rules)
        case Or(rules):
            return any(allows(r, n, i, j, head) for r in rules)
        case Custom():
            return (i + 2 * j + n) % 3 != 0  # what `refuse_thirds` says
    raise AssertionError(rule)


def score(rule: ScoreRule, x: np.ndarray, head: int, i: int, j: np.ndarray) -> np.ndarray:
    if isinstance(rule, Alibi):
        return x + np.float32(rule.slopes[head]) * (j - i)
    if isinstance(rule, RelativeBias):
        table = np.array(rule.tables[head], dtype=np.float32)
        reach = len(table) // 2
        return x + table[np.clip(j - i, -reach, reach) + reach]
    return np.asarray(rule.cap * np.tanh(x / rule.cap))


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """out, lse, sum of p |v|, and how far a score may be off because q was rounded, in float64."""
    q = case.q.double().numpy()
    k, v = (
        case.dequantized(*cache)
        for cache in ((case.k, case.k_scale, case.k_quant), (case.v, case.v_scale, case.v_quant))
    )
    out = np.zeros((len(q), case.num_qo_heads, case.head_dim_vo))
    scale, lse = np.zeros_like(out), np.full(out.shape[:2], -np.inf)
    score_error = np.zeros(out.shape[:2])
    is_q_rounded = case.k_quant is not None and case.k_quant.granularity == "channel"
    for n, head in np.ndindex(case.batch_size, case.num_qo_heads):
        for row in range(case.seqlen_q[n]):
            r, kv_head = case.qo_indptr[n] + row, head // case.group_size
            j = case.selected(n, row, head)
            slot = case.slots(n)[j]
            x = SCALE * (k[slot, kv_head] @ q[r, head])
            for rule in case.score_rules:
                x = score(rule, x, head, case.offsets[n] + row, j)
            logits = x if case.sink_logits is None else np.append(x, case.sink_logits[head])
            if not logits.size:
                continue
            lse[r, head] = np.logaddexp.reduce(logits)
            p = np.exp(x - lse[r, head]) * case.keep_weights(n, head, case.offsets[n] + row, j)
            out[r, head], scale[r, head] = p @ v[slot, kv_head], p @ np.abs(v[slot, kv_head])
            if is_q_rounded and len(j):
                size = (np.abs(k[slot, kv_head]) @ np.abs(q[r, head])).max()
                score_error[r, head] = UNIT[case.dtype] / 2 * SCALE * size
    return out, lse, scale, score_error


SCALE = 0.15


def to_lists(case: Case) -> CandidateLists | None:
    if case.sharing is None:
        return None
    flat = [entries for request in case.entries for block in request for entries in block]
    indptr = np.concatenate([[0], np.cumsum([len(entries) for entries in flat])])
    return CandidateLists(
        granularity="block" if case.block_size else "token",
        sharing=case.sharing,
        indptr=torch.as_tensor(indptr),
        indices=torch.tensor([e for entries in flat for e in entries], dtype=torch.int32),
        block_size=case.block_size or 1,
        q_block_size=case.q_block_size,
    )


def plan_arguments(case: Case, **changes):
    """What plan takes for a case."""
    options = {
        "qo_indptr": torch.as_tensor(case.qo_indptr),
        "seqlen_kv": list(case.seqlen_kv),
        "page_table": torch.from_numpy(case.page_table),
        "page_size": case.page_size,
        "num_pages": case.num_pages,
        "num_qo_heads": case.num_qo_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim_qk": case.head_dim_qk,
        "head_dim_vo": case.head_dim_vo,
        "sm_scale": SCALE,
        "dtype": case.dtype,
        "device": DEVICE,
        "q_offset": case.q_offset,
        "candidates": to_lists(case),
        "window": case.window,
        "num_sink_tokens": case.num_sink_tokens,
        "mask_rule": case.mask_rule,
        "score_rules": case.score_rules,
        "sink_logits": None if case.sink_logits is None else torch.tensor(case.sink_logits),
        "num_kv_splits": case.num_kv_splits,
        "tile_kv": case.tile_kv,
        "layout": case.layout,
        "k_quant": case.k_quant,
        "v_quant": case.v_quant,
        "dropout": case.dropout,
    }
    return options | changes


def build_plan(case: Case, **changes):
    return plan(**plan_arguments(case, **changes))


def paged(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """(slots, heads, dim) as a cache of the case's layout."""
    cache = rows.reshape(case.num_pages, case.page_size, case.num_kv_heads, -1)
    return (cache if case.layout == "NHD" else cache.transpose(1, 2)).contiguous().to(DEVICE)


def poison_unowned(case: Case, rows: torch.Tensor, value: float = math.nan) -> torch.Tensor:
    owned = np.concatenate([case.slots(n) for n in range(case.batch_size)])
    # An integer code cannot be NaN, and an 8-bit float is filled by way of a wider one.
    poisoned = torch.full_like(rows, 99) if rows.dtype == torch.int8 else torch.full(rows.shape, value).to(rows.dtype)
    poisoned[owned] = rows[owned]
    return poisoned


def poison_scales(case: Case, scale: torch.Tensor | None, quant: KVQuantization | None) -> torch.Tensor | None:
    """Scales of slots and pages that nobody owns are NaN."""
    if quant is not None and quant.granularity in ("page", "token"):
        owned = np.concatenate([case.slots(n) for n in range(case.batch_size)])
        owned = np.unique(owned // case.page_size) if quant.granularity == "page" else owned
        poisoned = torch.full_like(scale, math.nan)
        poisoned[owned] = scale[owned]
        scale = poisoned
    return None if scale is None else scale.to(DEVICE)


def run_case(case: Case, **changes) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs start as NaN; slots nobody owns hold NaN."""
    out = torch.full((len(case.q), case.num_qo_heads, case.head_dim_vo), math.nan, dtype=case.dtype, device=DEVICE)
    lse = torch.full(out.shape[:2], math.nan, device=DEVICE)
    k, v = (paged(case, poison_unowned(case, rows)) for rows in (case.k, case.v))
    scales = {
        "k_scale": poison_scales(case, case.k_scale, case.k_quant),
        "v_scale": poison_scales(case, case.v_scale, case.v_quant),
    }
    run(build_plan(case, **changes), case.q.to(DEVICE), k, v, **scales, out=out, lse=lse)
    return out.cpu(), lse.cpu()


def assert_near_oracle(case: Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    """out may be off by the rounding of P and of itself, both by what the float32 sums of products are off."""
    want_out, want_lse, scale, score_error = oracle(case)
    unit, slack = UNIT[case.dtype], 2e-5 if case.dtype == torch.float32 else 1e-4
    bound = 2 * unit * (scale + np.abs(want_out)) + (slack + 2 * score_error[..., None]) * scale
    error = np.abs(out.double().numpy() - want_out)
    assert (error <= bound).all(), f"out: worst {np.nanmax(error)}, NaN {np.isnan(error).sum()}"
    is_empty = np.isneginf(want_lse)
    assert np.array_equal(np.isneginf(lse.numpy()), is_empty)
    lse, want_lse = lse.double().numpy()[~is_empty], want_lse[~is_empty]
    error = np.maximum(np.abs(lse - want_lse) - score_error[~is_empty], 0)
    assert (error <= slack * np.maximum(1, np.abs(want_lse) / 32)).all(), f"lse: worst {error.max()}"


def check(case: Case) -> None:
    assert_near_oracle(case, *run_case(case))


RAGGED_RULES = {
    "none": None,
    "causal": Causal(),
    "window": Window(left=6, right=2),
    "left_window": Window(left=4),
    "prefix": PrefixLM((20, 0, 3, 1)),
    "document": Document(((0, 9, 24, 26), (0,), (0, 20), (1, 2))),
    "causal_document": And((Causal(), Document(((0, 9, 24, 26), (0,), (0, 20), (1, 2))))),
    "window_or_prefix": Or((And((Window(left=3), Causal())), Window(left=26, right=0), PrefixLM((4, 0, 2, 1)))),
    "sink_and_window": And(
        (Causal(), Or((Window(left=5), PrefixLM((3, 0, 3, 3)), Document(((0, 2), (0,), (0,), (0,))))))
    ),
}


@triton.jit
def refuse_thirds(q_idx, kv_idx, request, data):
    return (q_idx + 2 * kv_idx + request + tl.load(data)) % 3 != 0
