"""attn-gym's gather_attn: attention over listed keys, its eager implementation.

It reads one tensor as keys and as values. Keys and values side by side, and queries that are 0 where the values are,
make its scores those of the keys alone. Lists go over as they are; masked entries are struck from them, since causality
is the caller's part by its documentation.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnconform.conformance.adapters.per_request import Attended, PerRequest, gather, requests_with_rows
from attnconform.conformance.backend import Backward, Capabilities, Domain, Forward, OneOf, Tensors, Unavailable, Whole
from attnconform.conformance.bounds.numerics import Numerics, OutDtype
from attnconform.conformance.views import ProblemView

DTYPES: tuple[OutDtype, ...] = ("float32", "bfloat16", "float16")


def eager_numerics(dtype: OutDtype) -> Numerics:
    """Everything in float32, but that P is divided and then stored in the inputs' dtype."""
    if dtype == "float32":
        return Numerics(out_dtype=dtype, norm_p=True, heads_low=True)
    return Numerics(out_dtype=dtype, p_storage=dtype, dp_storage=dtype, norm_p=True, heads_low=True)


class Gather(PerRequest):
    """One query head at a time, so that heads may have lists of their own."""

    name = "attn-gym"
    listing: ClassVar[Domain] = OneOf(("sorted", "shuffled", "holes"))  # it documents that a repeated key counts again

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        try:
            from attn_gym import sparse
        except ModuleNotFoundError as error:
            raise Unavailable("attn-gym is not here: pip install 'attnconform[attn-gym]'") from error
        self.package = sparse
        self.capabilities = Capabilities(
            supported={
                "listing": self.listing,
                "local": OneOf(("none",)),  # its window is over another tensor
                "score": OneOf(("none",)),
                "refusal": OneOf(()),  # it documents that it ignores what is out of range
            },
            numerics={dtype: eager_numerics(dtype) for dtype in DTYPES},
        )

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        return self.attend_with(sinks_of(problem), problem, request, q, k, v)

    def attend_with(
        self, sinks: Tensor | None, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Attended:
        """Attention of one request with its heads' sink logits, (num_qo_heads,)."""
        spec = problem.spec
        zeros = q.new_zeros(1, 1, q.shape[1], k.shape[2] + v.shape[2])
        # it documents a positive scale; at 0 every score is 0, as with queries of 0
        queries, scale = (q, spec.sm_scale) if spec.sm_scale else (0 * q, 1.0)
        outs, lses = [], []
        for head in range(spec.num_qo_heads):
            kv = torch.cat([k[head // spec.group_size], v[head // spec.group_size]], dim=-1)[None, None].to(q.dtype)
            out, aux = self.package.gather_attn(
                pad(queries[head], (0, v.shape[2]))[None, None],
                zeros,
                kv,
                listed(problem, request, head)[None],
                None if sinks is None else sinks[head : head + 1],
                sliding_window_size=0,
                impl="reference",
                scale=scale,
                return_aux=self.package.AuxRequest(lse=True),
            )
            outs.append(out[0, 0, :, k.shape[2] :])
            lses.append(aux.lse[0, 0])
        return Attended(torch.stack(outs), torch.stack(lses), "reference")

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: Tensor, dlse: Tensor | None
    ) -> Backward:
        # the gradients of a group's heads, each rounded by the package, add up in float32
        wide = replace(tensors, k_cache=tensors.k_cache.float(), v_cache=tensors.v_cache.float())
        found, sinks = super().backward(problem, wide, forward, dout, dlse), sinks_of(problem)
        if sinks is None or dlse is None:
            return found
        dsink = torch.zeros_like(sinks)
        for n in requests_with_rows(problem):
            leaf, rows = sinks.clone().requires_grad_(), problem.q_rows(n)
            attended = self.attend_with(leaf, problem, n, *gather(problem, tensors, n))
            assert attended.lse is not None
            given = [dout[rows].transpose(0, 1), dlse[rows].transpose(0, 1)]
            dsink += torch.autograd.grad([attended.out, attended.lse], [leaf], given)[0]
        return replace(found, dsink=dsink)


class GatherRepeats(Gather):
    """The same, also handed lists that repeat a key, against the contract's sets. [SET-DUPLICATE]"""

    name = "attn-gym-repeats"
    listing = Whole()


def sinks_of(problem: ProblemView) -> Tensor | None:
    """Sink logits in float32, where there are any."""
    sinks = problem.spec.sink_logits
    return None if sinks is None else torch.as_tensor(sinks, dtype=torch.float32, device=problem.device)


def listed(problem: ProblemView, request: int, head: int) -> Tensor:
    """(seqlen_q, width) keys that a head's rows list, in the order given, -1 for masked ones."""
    allowed = problem.masks[request][head]
    lists = problem.spec.candidates
    if lists is None:
        keys = torch.arange(allowed.shape[1], device=problem.device).expand(*allowed.shape)
    else:
        index = [problem.spec.list_index(row, head) for row in problem.spec.rows() if row.request == request]
        blocks = problem.fixed_width_candidates.long()[index] * lists.block_size
        keys = (blocks[..., None] + torch.arange(lists.block_size, device=problem.device)).flatten(1)
    seen = (keys >= 0) & (keys < allowed.shape[1])
    # one column more, which no row may look at: a request that ended has none of its own
    may_look = pad(allowed, (0, 1)).gather(1, torch.where(seen, keys, allowed.shape[1]))
    return torch.where(may_look, keys, -1)
