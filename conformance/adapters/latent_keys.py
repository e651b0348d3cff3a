"""Problems as latent attention takes them: one KV head, whose keys begin with their values.

A key is its values, filled up with zeros, and then itself; queries are 0 where the values are.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from attnconform.conformance.adapters.attn_gym import listed
from attnconform.conformance.adapters.per_request import requests_with_rows
from attnconform.conformance.backend import Tensors
from attnconform.conformance.views import ProblemView

LATENT = 512  # values a key has


def latent_queries_and_keys(problem: ProblemView, tensors: Tensors, position_dim: int) -> tuple[Tensor, Tensor]:
    """q (total_q, num_qo_heads, LATENT + position_dim) and keys (num_slots, num_kv_heads, likewise)."""
    more = position_dim - problem.spec.head_dim_qk
    values = pad(problem.by_slot(tensors.v_cache), (0, LATENT - problem.spec.head_dim_vo))
    keys = torch.cat([values, pad(problem.by_slot(tensors.k_cache), (0, more))], dim=2)
    return pad(tensors.q, (LATENT, more)), keys


def slot_lists(problem: ProblemView, head: int, step: int) -> Tensor:
    """(total_q, 1, width) slots that a head's rows list, -1 for masked entries and beyond a list's end.

    The width is a multiple of step.
    """
    lists = []
    for n in requests_with_rows(problem):
        keys, slots = listed(problem, n, head), pad(problem.slots(n), (0, 1))
        lists += list(torch.where(keys >= 0, slots[keys], -1).int())
    filled = pad_sequence(lists, batch_first=True, padding_value=-1)
    return pad(filled, (0, max(-filled.shape[1] % step, step if filled.shape[1] == 0 else 0)), value=-1)[:, None]
