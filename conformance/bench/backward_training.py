"""Suite training: the same attention as a kernel, inside a layer, and inside a step that runs its layers twice.

A kernel's gain shrinks with everything around it: projections, the MLP, the loss, the optimizer, the second forward of
checkpointing. Each level is timed with sparse attention and, as `dense`, with torch's causal attention over the same
tokens. The step is a real one: embeddings, layers, cross-entropy, AdamW; its loss is held to fall.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.prefill import OurPrefill
from attnconform.conformance.bench.prefill_work import WORKS, Inputs, PrefillWork, make_inputs
from attnconform.conformance.bench.prefill_work import works as prompts
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import Call, measure

SUITE = "training"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # (tokens, heads, dim) each


@dataclass(frozen=True)
class ModelShape:
    """A small decoder whose attention is a prompt's."""

    work: PrefillWork
    layers: int = 4
    vocabulary: int = 8_192

    @property
    def width(self) -> int:
        return self.work.num_qo_heads * self.work.head_dim


def model_shape(machine: Machine) -> ModelShape:
    """Documents under a window of a quarter of the tokens on a GPU; a few rows in the interpreter."""
    if machine.is_real:
        work = replace(WORKS[1], seqlen=8_192, window=2_048, num_qo_heads=16, num_kv_heads=4)
        return ModelShape(replace(work, name="window 2048 + documents, T 8192, 4 layers of 2048"))
    return ModelShape(replace(prompts(machine)[1], name="tiny documents, 2 layers"), layers=2, vocabulary=32)


class Layer(nn.Module):
    """Attention and an MLP, each with a norm before it."""

    def __init__(self, shape: ModelShape, attend: Attend) -> None:
        super().__init__()
        work, width = shape.work, shape.width
        self.heads, self.kv_heads, self.dim, self.attend = work.num_qo_heads, work.num_kv_heads, work.head_dim, attend
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.project_in = nn.Linear(width, (self.heads + 2 * self.kv_heads) * self.dim, bias=False)
        self.project_out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.project_in(self.before_attention(x)).view(len(x), -1, self.dim)
        q, k, v = mixed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        x = x + self.project_out(self.attend(q, k, v).flatten(1))
        return x + self.mlp(self.before_mlp(x))


class Decoder(nn.Module):
    """Layers that are run again in the backward instead of being kept."""

    def __init__(self, shape: ModelShape, attend: Attend) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape, attend) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def sparse_attend(work: PrefillWork, inputs: Inputs) -> Attend:
    """The bundled kernels; the plan and the backward's work are made once, for all layers and steps."""
    from attnconform.kernels.sparse_attention import plan_backward, sparse_attention

    plan = OurPrefill(work, inputs).plan
    backward_work = plan_backward(plan)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.unflatten(0, (-1, work.page_size)) for x in (k, v))
        out: Tensor = sparse_attention(plan, q, k, v, work=backward_work)[0]
        return out

    return attend


def dense_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every earlier token, by torch's fastest kernel here."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


@dataclass(eq=False)
class Levels:
    """The three levels as calls, around one attention."""

    shape: ModelShape
    inputs: Inputs
    attend: Attend

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        device, dtype = self.inputs[0].device, self.inputs[0].dtype
        self.model = Decoder(self.shape, self.attend).to(device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.tokens = torch.randint(self.shape.vocabulary, (self.shape.work.seqlen + 1,), device=device)
        self.leaves = [x.reshape(-1, *x.shape[-2:]).clone().requires_grad_() for x in self.inputs]
        self.x = torch.randn(self.shape.work.seqlen, self.shape.width, device=device, dtype=dtype, requires_grad=True)
        self.losses: list[Tensor] = []

    def kernel(self) -> None:
        """Forward and backward of the attention alone."""
        out = self.attend(*self.leaves)
        torch.autograd.grad(out, self.leaves, out.detach())

    def layer(self) -> None:
        """Forward and backward of a layer, parameters included."""
        out = self.model.layers[0](self.x)
        torch.autograd.grad(out, [self.x, *self.model.layers[0].parameters()], out.detach())

    def step(self) -> None:
        """Loss, gradients with every layer run twice, and the optimizer."""
        logits = self.model(self.tokens[:-1])
        loss = nn.functional.cross_entropy(logits.float(), self.tokens[1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    @property
    def calls(self) -> dict[str, Call]:
        return {"kernel": self.kernel, "layer": self.layer, "training step": self.step}

    @property
    def has_learned(self) -> bool:
        """Whether the loss, of the same tokens again and again, fell."""
        return bool(self.losses[-1] < self.losses[0])


def training_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Kernel, layer and step; forward and backward in each."""
    shape = model_shape(machine)
    inputs = make_inputs(shape.work, machine)
    sparse = Levels(shape, inputs, sparse_attend(shape.work, inputs))
    dense = Levels(shape, inputs, dense_attend)
    for level, call in sparse.calls.items():
        machine.check_time()
        ours = measure(call, machine, seconds=options.seconds).timing
        theirs = measure(dense.calls[level], machine, seconds=options.seconds).timing
        yield BenchRow(
            suite=SUITE,
            phase="prefill",
            work=shape.work.name,
            stage=level,
            ours=ours,
            dense=theirs,
            rate=shape.work.edges / (shape.work.seqlen * (shape.work.seqlen + 1) / 2),
            path=told(level, sparse, ours.host.median, theirs.host.median, machine),
        )


def told(level: str, levels: Levels, ours: float, dense: float, machine: Machine) -> str:
    """What the level gains over dense attention, and its memory; the step's loss too."""
    found = f"{dense / ours:.2f} times as fast as with dense attention"
    if machine.is_real:
        found += f", peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"
    if level != "training step":
        return found
    first, last = float(levels.losses[0]), float(levels.losses[-1])
    tokens = levels.shape.work.seqlen / (ours * 1e-6)
    return (
        f"{found}, {tokens:.0f} tokens a second; loss {first:.3f} to {last:.3f} in {len(levels.losses)} steps"
        f"{'' if levels.has_learned else ': it does not fall'}"
    )
