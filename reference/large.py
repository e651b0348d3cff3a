"""Attention and its gradients for large problems: the formulas of Steps on tiles of rows, heads and keys.

Written against the array API, so that the same lines run on numpy and, on a CPU or a GPU, on torch in float64; numpy
is the authority. Which keys a row attends is decided in numpy, from the problem alone. Memory is the results and one
tile; the cost grows with the listed keys of each tile, never with the length of the cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np

from attnconform.reference.attention import check_tensors
from attnconform.reference.candidates import HOLE, expand_entries, rank_bias_of, sink_positions
from attnconform.reference.coordinates import BoolArray, IntArray, Positions
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, QueryRow, check_problem
from attnconform.reference.results import AttentionResult, Gradients
from attnconform.reference.rule_values import depends_on_head, mask_allows, relative_bucket
from attnconform.reference.rules import Alibi, CustomScore, RelativeBias, ScoreRule, SoftCap

Array = Any  # of whichever library q, k and v belong to
TILE_ROWS = 128
TILE_EDGES = 1 << 20  # scores of one tile: 8 MiB in float64, and a handful of arrays of that size


@dataclass(frozen=True)
class Unit:
    """Query rows of one request, and query heads of one KV head, that read the same list."""

    where: QueryRow  # the first row
    num_rows: int
    heads: slice
    kv_head: int
    positions: IntArray  # (n,) listed by some row of the unit, ascending
    is_entry: BoolArray  # (n,) listed by an entry, and so by every row

    @property
    def rows(self) -> slice:
        return slice(self.where.row, self.where.row + self.num_rows)

    @property
    def q_idx(self) -> IntArray:
        """(num_rows, 1) logical positions."""
        return self.where.q_idx + np.arange(self.num_rows)[:, None]


@dataclass(frozen=True)
class Tile:
    """Some keys of a unit, each seen by one of its rows and heads at least."""

    positions: IntArray  # (n,) logical
    slots: IntArray  # (n,) where the unit's KV head keeps them
    mask: BoolArray  # (1 or heads, num_rows, n) True where a row attends a key


# -- which keys -----------------------------------------------------------------------------------------------------


def units(problem: AttentionProblem) -> Iterator[Unit]:
    """The rows and heads of a problem, by the list that they share. [GQA-LISTS]"""
    lists, group = problem.candidates, problem.group_size
    block = TILE_ROWS if lists is None else lists.q_block_size
    width = 1 if lists is not None and lists.sharing == "query_head" else group
    for where in problem.rows():
        if where.local % block % TILE_ROWS:
            continue
        left = int(problem.qo_indptr[where.request + 1]) - where.row
        num_rows = min(left, TILE_ROWS, block - where.local % block)
        for first in range(0, problem.num_qo_heads, width):
            positions, is_entry = listed(problem, where, num_rows, first)
            yield Unit(where, num_rows, slice(first, first + width), first // group, positions, is_entry)


def listed(problem: AttentionProblem, where: QueryRow, num_rows: int, qo_head: int) -> tuple[IntArray, BoolArray]:
    """Positions that some row of a unit lists, ascending, and which of them are entries. [SET-IDENTITY, SET-UNION]"""
    seqlen_kv, lists = int(problem.seqlen_kv[where.request]), problem.candidates
    if lists is None:
        return np.arange(seqlen_kv), np.ones(seqlen_kv, dtype=bool)
    entries = lists.entries(problem.list_index(where, qo_head))
    dynamic = np.unique(expand_entries(entries[entries != HOLE], block_size=lists.block_size, seqlen_kv=seqlen_kv))
    sinks = sink_positions(num_sink_tokens=lists.num_sink_tokens, seqlen_kv=seqlen_kv)
    if not lists.window:
        local = sinks[:0]
    else:
        end = min(where.q_idx + num_rows, seqlen_kv)
        local = np.arange(max(0, where.q_idx - lists.window + 1), max(0, end))
    positions = np.unique(np.concatenate([dynamic, sinks, local]))
    return positions, np.isin(positions, dynamic, assume_unique=True)


def tiles(problem: AttentionProblem, unit: Unit) -> Iterator[Tile]:
    """The keys of a unit that one of its rows attends, some at a time. [BLOCK-MEMBER, MASK-BEFORE-MAX]"""
    width = max(1, TILE_EDGES // (unit.num_rows * (unit.heads.stop - unit.heads.start)))
    for start in range(0, len(unit.positions), width):
        piece = slice(start, start + width)
        mask = attends(problem, unit, unit.positions[piece], unit.is_entry[piece])
        is_seen = mask.any(axis=(0, 1))
        if is_seen.any():
            positions = unit.positions[piece][is_seen]
            slots = problem.cache.slots(unit.where.request, Positions(positions))
            yield Tile(positions, problem.cache.head_slots(slots, unit.kv_head).values, mask[:, :, is_seen])


def attends(problem: AttentionProblem, unit: Unit, positions: IntArray, is_entry: BoolArray) -> BoolArray:
    """True where a row attends a position; one head stands for all where no rule tells them apart."""
    lists, q_idx = problem.candidates, unit.q_idx
    if lists is None:
        is_listed = np.ones((unit.num_rows, len(positions)), dtype=bool)
    else:
        distance = q_idx - positions
        in_window = (distance >= 0) & (distance < lists.window)
        is_listed = is_entry | (positions < lists.num_sink_tokens) | in_window
    heads = range(unit.heads.start, unit.heads.stop)
    asked = heads if depends_on_head(problem.mask_rule) else heads[:1]
    rules = [mask_allows(problem.mask_rule, unit.where.request, q_idx, positions[None], h) for h in asked]
    return np.stack([is_listed & allowed for allowed in rules])


def check_large(problem: AttentionProblem, q: Array, k: Array, v: Array) -> None:
    """Refuses what the contract refuses, and what only the plain reference computes."""
    check_problem(problem)
    check_tensors(problem, q, k, v)
    absent: dict[str, object] = {
        "k_quant": problem.k_quant,
        "v_quant": problem.v_quant,
        "dropout": problem.dropout,
        "rope": problem.rope if problem.rope and problem.rope.turns else None,
        "epilogue": problem.epilogue or None,
        "score_rules": next((rule for rule in problem.score_rules if isinstance(rule, CustomScore)), None),
    }
    for name, value in absent.items():
        if value is not None:
            raise RefusedInput("SAFE-REFUSE", name, type(value).__name__, "the large oracle does without it")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype != array_api_compat.array_namespace(tensor).float64:
            raise RefusedInput("SAFE-REFUSE", f"{name}.dtype", tensor.dtype, "the large oracle computes in float64")


# -- arithmetic -----------------------------------------------------------------------------------------------------


def like(array: Any, other: Array) -> Array:
    """A numpy array in the library and on the device of another array."""
    xp = array_api_compat.array_namespace(other)
    return xp.asarray(np.ascontiguousarray(array), device=array_api_compat.device(other))


def tile_scores(
    problem: AttentionProblem,
    unit: Unit,
    tile: Tile,
    q: Array,  # (heads, num_rows, head_dim_qk)
    k: Array,  # (n, head_dim_qk)
) -> tuple[Array, Array]:
    """Scores (heads, num_rows, n), -inf where nothing is attended, and their slope. [SCORE-ORDER, GRAD-SOFTCAP]"""
    xp = array_api_compat.array_namespace(q)
    scores = problem.sm_scale * xp.matmul(q, xp.permute_dims(k, (1, 0)))
    slope = xp.ones_like(scores)
    for rule in problem.score_rules:
        scores, factor = apply_rule(rule, scores, unit, tile)
        slope = slope * factor
    lists = problem.candidates
    if lists is not None and lists.rank_bias is not None:
        entries = lists.entries(problem.list_index(unit.where, unit.heads.start))
        scores = scores + like(rank_bias_of(entries, tile.positions, lists.rank_bias), q)
    return xp.where(like(tile.mask, q), scores, like(np.array(-np.inf), q)), slope


def apply_rule(rule: ScoreRule, scores: Array, unit: Unit, tile: Tile) -> tuple[Array, Array | float]:
    """Scores after one rule, and the rule's slope. [SCORE-ALIBI, SCORE-RELATIVE, SCORE-SOFTCAP]"""
    xp = array_api_compat.array_namespace(scores)
    match rule:
        case Alibi(slopes):
            distance = (tile.positions - unit.q_idx).astype(np.float64)
            return scores + like(np.array(slopes[unit.heads])[:, None, None] * distance, scores), 1.0
        case RelativeBias(tables):
            bucket = relative_bucket(len(tables[0]), unit.q_idx, tile.positions)
            return scores + like(np.array(tables[unit.heads])[:, bucket], scores), 1.0
        case SoftCap(cap):
            bent = xp.tanh(scores / cap)
            return cap * bent, 1 - bent**2
        case CustomScore():
            raise AssertionError("check_large refuses it")


def of_heads(tensor: Array, unit: Unit) -> Array:
    """A unit's part of a tensor of all rows and heads, (heads, num_rows, ...)."""
    xp = array_api_compat.array_namespace(tensor)
    part = tensor[unit.rows, unit.heads, ...]
    return xp.permute_dims(part, (1, 0, *range(2, part.ndim)))


def large_attention(problem: AttentionProblem, q: Array, k: Array, v: Array) -> AttentionResult:
    """out and lse of every row and head, as arrays of q's library; shapes as in `attention`, all float64.

    Raises RefusedInput where `attention` does, and for quantized caches, dropout, keys turned at read, epilogues and
    registered score rules.
    """
    check_large(problem, q, k, v)
    xp, device = array_api_compat.array_namespace(q), array_api_compat.device(q)
    shape = (problem.total_q, problem.num_qo_heads)
    out = xp.zeros((*shape, problem.head_dim_vo), dtype=xp.float64, device=device)
    lse = xp.zeros(shape, dtype=xp.float64, device=device)
    for unit in units(problem):
        unit_out, unit_lse = forward_unit(problem, unit, q, k, v)
        out[unit.rows, unit.heads, :] = xp.permute_dims(unit_out, (1, 0, 2))
        lse[unit.rows, unit.heads] = xp.permute_dims(unit_lse, (1, 0))
    return AttentionResult(out, lse)


def forward_unit(problem: AttentionProblem, unit: Unit, q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """out (heads, num_rows, head_dim_vo) and lse (heads, num_rows), tile after tile. [MERGE-STATE, MERGE-SPLIT]"""
    xp = array_api_compat.array_namespace(q)
    q = of_heads(q, unit)
    row_sum = xp.zeros(q.shape[:2], dtype=xp.float64, device=array_api_compat.device(q))
    row_max, total = row_sum - np.inf, row_sum[..., None] * xp.zeros_like(v[0, 0, :])
    for tile in tiles(problem, unit):
        slots = like(tile.slots, q)
        scores, _ = tile_scores(problem, unit, tile, q, k[slots, unit.kv_head])
        above, fade = next_max(row_max, xp.max(scores, axis=-1))
        p = xp.exp(scores - above[..., None])
        row_sum = row_sum * fade + xp.sum(p, axis=-1)
        total = total * fade[..., None] + xp.matmul(p, v[slots, unit.kv_head])
        row_max = xp.where(row_sum > 0, above, row_max)
    check_empty(problem, unit, row_sum)
    if problem.sink_logits is not None:
        sinks = like(problem.sink_logits[unit.heads], q)[:, None]
        above, fade = next_max(row_max, sinks + xp.zeros_like(row_max))
        row_sum, total = row_sum * fade + xp.exp(sinks - above), total * fade[..., None]
        row_max = above
    safe_sum = xp.where(row_sum > 0, row_sum, xp.ones_like(row_sum))
    return total / safe_sum[..., None], row_max + xp.log(safe_sum)


def next_max(row_max: Array, other: Array) -> tuple[Array, Array]:
    """The larger maximum, 0 where nothing was seen yet, and what older sums are multiplied by. [MERGE-EMPTY]"""
    xp = array_api_compat.array_namespace(row_max)
    above = xp.where(row_max > other, row_max, other)
    above = xp.where(xp.isfinite(above), above, xp.zeros_like(above))
    return above, xp.exp(row_max - above)


def check_empty(problem: AttentionProblem, unit: Unit, row_sum: Array) -> None:
    """Refuses a row that sees no key, where the problem says so. [EMPTY-POLICY]"""
    if problem.empty_row == "zero":
        return
    for r in range(unit.num_rows):
        if bool(array_api_compat.array_namespace(row_sum).any(row_sum[:, r] == 0)):
            limit = "it sees no key and empty_row is 'refuse'"
            raise RefusedInput("EMPTY-POLICY", "row", unit.where.row + r, limit)


def large_gradients(
    problem: AttentionProblem,
    q: Array,
    k: Array,
    v: Array,
    result: AttentionResult,  # of large_attention, for the same problem and tensors
    dout: Array,  # (total_q, num_qo_heads, head_dim_vo)
    dlse: Array | None = None,  # (total_q, num_qo_heads); None is all 0
) -> Gradients:
    """dq, dk, dv and dsink as arrays of q's library; slots in numpy. dscore is left out. [GRAD-FORMULA, GRAD-ZERO]"""
    check_large(problem, q, k, v)
    xp, device = array_api_compat.array_namespace(q), array_api_compat.device(q)
    touched = touched_slots(problem)
    like_k, like_v = ((len(touched), problem.num_kv_heads, x.shape[2]) for x in (k, v))
    into = Gradients(
        dq=xp.zeros(q.shape, dtype=xp.float64, device=device),
        slots=touched,
        dk=xp.zeros(like_k, dtype=xp.float64, device=device),
        dv=xp.zeros(like_v, dtype=xp.float64, device=device),
        dsink=None if problem.sink_logits is None else like(np.zeros(problem.num_qo_heads), q),
    )
    delta = xp.sum(dout * result.out, axis=-1) - (0.0 if dlse is None else dlse)
    for unit in units(problem):
        backward_unit(problem, unit, (q, k, v), (result.lse, dout, delta), into)
    return into


def touched_slots(problem: AttentionProblem) -> IntArray:
    """Every slot that some row attends, ascending. [GRAD-ZERO]"""
    is_touched = np.zeros(problem.cache.num_slots, dtype=bool)
    for unit in units(problem):
        for tile in tiles(problem, unit):
            is_touched[tile.slots] = True
    return np.flatnonzero(is_touched)


def backward_unit(
    problem: AttentionProblem,
    unit: Unit,
    inputs: tuple[Array, Array, Array],  # q, k, v
    arrives: tuple[Array, Array, Array],  # lse, dout, and delta = Σ dout out - dlse
    into: Gradients,
) -> None:
    """Adds one unit's part of every gradient. [GRAD-FORMULA, GRAD-SUM, GRAD-SINK]"""
    q, k, v = inputs
    xp = array_api_compat.array_namespace(q)
    q, lse, dout, delta = (of_heads(x, unit) for x in (q, *arrives))
    safe_lse = xp.where(xp.isfinite(lse), lse, xp.zeros_like(lse))
    dq = xp.zeros_like(q)
    for tile in tiles(problem, unit):
        slots = like(tile.slots, q)
        keys, values = k[slots, unit.kv_head], v[slots, unit.kv_head]
        scores, slope = tile_scores(problem, unit, tile, q, keys)
        p = xp.exp(scores - safe_lse[..., None])
        ds = p * (xp.matmul(dout, xp.permute_dims(values, (1, 0))) - delta[..., None]) * slope
        dq = dq + problem.sm_scale * xp.matmul(ds, keys)
        at = np.searchsorted(into.slots, tile.slots)
        add_rows(into.dk, at, unit.kv_head, problem.sm_scale * over_rows(ds, q))
        add_rows(into.dv, at, unit.kv_head, over_rows(p, dout))
    into.dq[unit.rows, unit.heads, :] = xp.permute_dims(dq, (1, 0, 2))
    if into.dsink is not None and problem.sink_logits is not None:
        sinks = like(problem.sink_logits[unit.heads], q)[:, None]
        into.dsink[unit.heads] -= xp.sum(xp.exp(sinks - lse) * delta, axis=1)


def over_rows(edges: Array, rows: Array) -> Array:
    """(n, dim): each key's sum over all heads and rows of (heads, rows, n) edges times (heads, rows, dim)."""
    xp = array_api_compat.array_namespace(edges)
    flat_edges, flat_rows = (xp.reshape(x, (-1, x.shape[2])) for x in (edges, rows))
    return xp.matmul(xp.permute_dims(flat_edges, (1, 0)), flat_rows)


def add_rows(into: Array, at: IntArray, kv_head: int, rows: Array) -> None:
    """Adds rows to one KV head; a slot that stands at two positions takes both. [GRAD-SUM, SET-ALIAS]"""
    left = np.arange(len(at))
    while len(left):
        _, first = np.unique(at[left], return_index=True)
        now = left[first]
        into[like(at[now], into), kv_head] += rows[like(now, into), ...]
        left = np.delete(left, first)
