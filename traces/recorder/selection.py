"""Which keys a sparse selector would hand to attention, for query rows of a real model.

Each selector sees one layer's queries and keys and lists ids per row and KV head: token positions, or blocks of
BLOCK_SIZE tokens. Scores of the query heads of a KV head are merged by the sum of their probabilities. Lists keep
what a kernel would be handed: holes (-1) where fewer keys are visible than the budget, and repetitions where two
branches name the same id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnconform.traces.statistics import SelectedRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnconform.traces.statistics import Granularity

BLOCK_SIZE = 64
SINKS = 4
WINDOW = 256
# Local layers see 512 keys: the budget of the global layers would select them all.
BLOCK_BUDGET = {"global": 16, "local": 4}
TOKEN_BUDGET = {"global": 256, "local": 64}


@dataclass(frozen=True)
class Rows:
    """The queries of some rows of one KV head's group, and all keys up to the last row."""

    q: torch.Tensor  # (group_size, rows, head_dim)
    k: torch.Tensor  # (seqlen_kv, head_dim)
    q_positions: torch.Tensor  # (rows,)
    window: int | None

    @property
    def kind(self) -> str:
        """'global' or 'local', the key of the budgets."""
        return "global" if self.window is None else "local"

    @property
    def first_visible(self) -> torch.Tensor:
        """The first position that each row sees."""
        if self.window is None:
            return torch.zeros_like(self.q_positions)
        return (self.q_positions - self.window + 1).clamp(min=0)


def select_token_topk(rows: Rows) -> SelectedRows:
    """The positions of the largest merged attention probabilities."""
    budget = TOKEN_BUDGET[rows.kind]
    j = torch.arange(len(rows.k))
    visible = (j <= rows.q_positions[:, None]) & (j >= rows.first_visible[:, None])
    p = probabilities(rows.q @ rows.k.T, visible, rows.q.shape[-1])
    merged = p.sum(0).masked_fill(~visible, -1)
    listed, threshold = top_ids(merged, budget)
    private = torch.stack([top_ids(head.masked_fill(~visible, -1), budget)[0] for head in p])
    return pack(rows, listed, count_ties(merged, threshold), private, granularity="token")


def select_block_topk(rows: Rows) -> SelectedRows:
    """Blocks of the largest merged probabilities of their mean keys, then the row's own block once more."""
    budget = BLOCK_BUDGET[rows.kind]
    b = torch.arange(-(-len(rows.k) // BLOCK_SIZE))
    own = rows.q_positions // BLOCK_SIZE
    visible = (b <= own[:, None]) & (b >= (rows.first_visible // BLOCK_SIZE)[:, None])
    p = probabilities(block_scores(rows, own), visible, rows.q.shape[-1])
    merged = p.sum(0).masked_fill(~visible, -1)
    listed, threshold = top_ids(merged, budget)
    private = torch.stack([top_ids(head.masked_fill(~visible, -1), budget)[0] for head in p])
    with_own = torch.cat([listed, own[:, None]], 1)
    private = torch.cat([private, own.expand(len(p), -1)[..., None]], 2)
    return pack(rows, with_own, count_ties(merged, threshold), private, granularity="block")


def select_window_sink(rows: Rows) -> SelectedRows:
    """The last WINDOW positions, then the first SINKS, whatever the scores."""
    distance = torch.arange(WINDOW)
    recent = rows.q_positions[:, None] - distance
    sinks = torch.arange(SINKS).expand(len(recent), -1)
    listed = torch.cat([recent, sinks], 1)
    listed[(listed < rows.first_visible[:, None]) | (listed > rows.q_positions[:, None])] = -1
    return pack(rows, listed, None, listed.expand(len(rows.q), -1, -1), granularity="token")


SELECTORS: dict[str, Callable[[Rows], SelectedRows]] = {
    "block_topk": select_block_topk,
    "token_topk": select_token_topk,
    "window_sink": select_window_sink,
}


def block_scores(rows: Rows, own: torch.Tensor) -> torch.Tensor:  # -> (group_size, rows, blocks)
    """Query times mean key of each block; in the row's own block only keys up to the row are averaged."""
    starts = range(0, len(rows.k), BLOCK_SIZE)
    means = torch.stack([rows.k[start : start + BLOCK_SIZE].mean(0) for start in starts])
    first = own * BLOCK_SIZE
    so_far = [rows.k[a : i + 1].mean(0) for a, i in zip(first.tolist(), rows.q_positions.tolist(), strict=True)]
    scores: torch.Tensor = rows.q @ means.T
    scores[:, torch.arange(len(own)), own] = (rows.q * torch.stack(so_far)).sum(-1)
    return scores


def probabilities(scores: torch.Tensor, visible: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Softmax of the scaled scores over the visible ids, per query head."""
    return torch.softmax((scores * head_dim**-0.5).masked_fill(~visible, -torch.inf), -1)


def top_ids(scores: torch.Tensor, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (rows, budget) of the largest non-negative scores, -1 where too few, and the lowest score taken."""
    taken = scores.topk(min(budget, scores.shape[1]), -1)
    ids = taken.indices.masked_fill(taken.values < 0, -1)
    ids = torch.nn.functional.pad(ids, (0, budget - ids.shape[1]), value=-1)
    # Where nothing had to be left out, the threshold decides nothing.
    decides = (scores >= 0).sum(-1) > budget
    return ids, torch.where(decides, taken.values[:, -1], torch.nan)


def count_ties(scores: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Other ids whose score is the threshold's once both are stored as bfloat16; 0 without a threshold."""
    same = scores.bfloat16() == threshold.bfloat16()[:, None]
    return (same & (scores >= 0)).sum(-1).sub(1).clamp(min=0)


def pack(
    rows: Rows,
    listed: torch.Tensor,  # (rows, width)
    ties: torch.Tensor | None,
    private: torch.Tensor,  # (group_size, rows, width)
    *,
    granularity: Granularity,
) -> SelectedRows:
    """The selection as arrays, with the size of the union of the heads' private selections."""
    union = [row.unique() for row in private.transpose(0, 1).flatten(1)]
    alone = [row.unique() for row in private[0]]
    return SelectedRows(
        q_positions=rows.q_positions.numpy(),
        first_visible=rows.first_visible.numpy(),
        listed=listed.numpy(),
        ties=None if ties is None else ties.numpy(),
        union=torch.tensor([int((u >= 0).sum()) for u in union]).numpy(),
        private=torch.tensor([int((u >= 0).sum()) for u in alone]).numpy(),
        granularity=granularity,
        block_size=BLOCK_SIZE,
    )
