"""Whether a forward call computed every pair of query and key, as far as its torch operators show.

What numpy, a compiled extension or a Triton kernel does inside is not seen: silence proves nothing, a finding does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnconform.conformance.judge.trial import BackendCrash, Trial
from attnconform.reference.problem import AttentionProblem

FEW = 0.5  # of all pairs are edges at most, where computing all of them counts as dense
LEAST_KEYS = 16  # a request of fewer keys is one block, and reading it whole is no other path
FUSED = "_scaled_dot_product_"  # torch's own attention, of which a path has to be named


class DenseWatch(TorchDispatchMode):
    """Notes the first floating tensor that has an element for every pair of some request."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:  # (seqlen_kv, num_qo_heads * seqlen_q * seqlen_kv)
        super().__init__()  # type: ignore[no-untyped-call]
        self.pairs = frozenset(pairs)
        self.lengths = frozenset(seqlen_kv for seqlen_kv, _ in pairs)
        self.seen: str | None = None

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        done = func(*args, **(kwargs or {}))
        if self.seen is None:
            self.note(str(func), args, done)
        return done

    def note(self, name: str, args: tuple[Any, ...], done: Any) -> None:
        """Notes an operator whose result, or whose keys, are those of a dense path."""
        if FUSED in name and len(args) > 1 and args[1].shape[-2] in self.lengths:
            self.seen = f"{name} ran on {tuple(args[1].shape)} keys"
            return
        for tensor in tree_leaves(done):
            is_scores = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim >= 2
            if is_scores and (tensor.shape[-1], tensor.numel()) in self.pairs:
                self.seen = f"{name} made a tensor of {tuple(tensor.shape)}"
                return


def watch_for_dense(trial: Trial) -> str | None:
    """What a forward call did that only a dense path does; None where it did not, or where nobody could tell."""
    pairs = sparse_requests(trial)
    if not pairs:
        return None
    watch = DenseWatch(pairs)
    try:
        with watch:  # what the judge does itself has other shapes
            trial.run(trial.values, unowned=0.0)
    except BackendCrash:
        return None  # a compiled call may not bear being watched, and the unwatched calls were judged
    return watch.seen


def sparse_requests(trial: Trial) -> list[tuple[int, int]]:
    """(seqlen_kv, number of pairs) of the requests that have few edges among many pairs."""
    problem: AttentionProblem = trial.problem
    found = []
    for n in range(problem.batch_size):
        rows, seqlen_kv = range(int(problem.qo_indptr[n]), int(problem.qo_indptr[n + 1])), int(problem.seqlen_kv[n])
        pairs = len(rows) * problem.num_qo_heads * seqlen_kv
        edges = sum(len(trial.edges.of(row, h)[1]) for row in rows for h in range(problem.num_qo_heads))
        # lengths that a head or its group has as well would make other tensors look like scores
        is_telling = seqlen_kv not in (problem.head_dim_qk, problem.head_dim_vo)
        if seqlen_kv >= LEAST_KEYS and rows and is_telling and edges <= FEW * pairs:
            found.append((seqlen_kv, pairs))
    return found
