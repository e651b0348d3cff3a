"""The bundled Triton kernels, judged like anyone else's. Without a GPU they run in Triton's interpreter."""

import dataclasses
import os
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from msgspec.structs import replace

from attnconform.conformance.adapters.cuda_graphs import CapturedRun
from attnconform.conformance.adapters.quickened_interpreter import quicken
from attnconform.conformance.adapters.triton_structures import TritonStructures
from attnconform.conformance.backend import (
    Backend,
    Backward,
    Capabilities,
    Determinism,
    Domain,
    Forward,
    OneOf,
    Tensors,
    Unavailable,
    Whole,
)
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.conformance.cases.axes import FORWARD_AXES
from attnconform.conformance.judge.storage import TORCH_DTYPES
from attnconform.conformance.views import ProblemView
from attnconform.reference import rules as spec_rules
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.quantization import Quantization

REFUSALS = OneOf(
    (
        "negative-not-hole", "negative-wraps", "position-at-length", "position-of-longer-request", "position-far-out",
        "block-past-the-end", "page-at-pool-size", "page-missing", "page-table-too-short", "repeated-key-asked-for",
        "head-map-uneven", "too-few-lists", "scale-nan", "sink-nan", "slope-infinite", "cap-zero", "slopes-too-few",
        "window-negative", "query-of-another-head-dim", "cache-of-another-head-count", "bias-infinite",
        "bias-table-even", "head-windows-too-few", "scale-shape", "scale-zero", "dropout-of-all", "dropout-negative",
        "foreign-page",
    )
)  # fmt: skip

EXPRESSIBLE: dict[str, Domain] = {
    "refusal": REFUSALS,
    # a registered rule has no jit function of that name
    "mask": OneOf(tuple(value for value in FORWARD_AXES["mask"] if value != "custom")),
    "score": OneOf(tuple(value for value in FORWARD_AXES["score"] if value != "custom")),
    "head_dim": OneOf((*FORWARD_AXES["head_dim"], "576/512")),
    "quant": Whole(),
    "dropout": Whole(),
}

# what the forward's kernel for one kind of GPU takes; the rest of a plan is judged under `triton`
EXPRESSIBLE_ON_HOPPER: dict[str, Domain] = {
    "refusal": OneOf(()),
    "dtype": OneOf(("bfloat16", "float16")),
    "head_dim": OneOf(("64/64", "128/128")),
    "page_size": OneOf(("16", "32")),
    "granularity": OneOf(("dense", "block")),
    "local": OneOf(("none",)),
    "mask": EXPRESSIBLE["mask"],
    "score": OneOf(("none", "alibi", "softcap")),
}


def interpreting(device: str) -> bool:
    """Whether Triton must interpret; says so to Triton, which asks when a kernel is defined.

    Raises Unavailable where its interpreter cannot work in this process.
    """
    if device.startswith("cuda"):
        return False
    if tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 4):
        raise Unavailable(f"Triton's interpreter needs numpy < 2.4, but numpy is {np.__version__}")
    # Triton's own library is made of kernels too.
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise Unavailable("Triton was imported to compile, and cannot interpret any more: set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
    return True


def declared_numerics(interpreted: bool) -> dict[str, Numerics]:
    """Arithmetic of the kernels; a tile may have 16 keys or 256, and partial states of splits are merged."""
    suffix = "" if interpreted else "-hopper"
    tiles = {"min_tile": 16, "denominator_tile": 256, "num_splits": 8 if interpreted else 64}
    # scales of channels go into q, those of pages and tokens into P, and both are rounded to float16
    bfloat16 = replace(NUMERICS_CLASSES[f"bf16{suffix}"], scale_bits=11, **tiles)
    return {
        "bfloat16": bfloat16,
        "bfloat16/codes": replace(bfloat16, p_storage="float16"),  # P meets codes, which float16 holds exactly
        "float16": replace(NUMERICS_CLASSES[f"fp16{suffix}"], scale_bits=11, **tiles),
        "float32": replace(NUMERICS_CLASSES["fp32"], **tiles),
    }


def refuse_inexpressible(spec: AttentionProblem) -> None:
    """Refuses what the kernels' plan has no word for, and would therefore not notice. [SET-FORM]"""
    if spec.candidates is not None and spec.candidates.form != "set":
        raise RefusedInput("SET-FORM", "form", spec.candidates.form, "the kernels' candidates are a set")
    if spec.empty_row != "zero":
        raise RefusedInput("EMPTY-POLICY", "empty_row", spec.empty_row, "the kernels give an empty row 0")


@dataclass(frozen=True)
class Saved:
    """What the backward needs of the forward."""

    plan: Any
    out: torch.Tensor
    lse: torch.Tensor


class TritonKernels(TritonStructures, Backend):
    """plan, run and backward of kernels/sparse_attention."""

    name = "triton"
    rows_per_union: ClassVar[int | None] = None  # by what the lists overlap
    plans_on_device: ClassVar[bool] = False  # the lists of a case are on the host, and a plan is made where lists lie
    backward_mode: ClassVar[str] = "kv_centric"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        interpreted = interpreting(device)
        try:
            from attnconform.kernels import sparse_attention
            from attnconform.kernels.sparse_attention import rules
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise Unavailable("the bundled kernels need Triton: pip install triton") from error
        if interpreted:
            quicken()
        self.kernels, self.backward_kernel, self.rules = sparse_attention, sparse_attention.backward, rules
        self.refusals = (sparse_attention.PlanError, RefusedInput)
        self.capabilities = Capabilities(
            supported=EXPRESSIBLE,
            numerics=declared_numerics(interpreted),
            tolerates_nonfinite=True,
            score_gradients=True,
            checks_owner=True,
        )

    def plan(self, problem: ProblemView, dtype: torch.dtype) -> Any:
        """The kernels' plan of a problem."""
        return self.kernels.plan(
            **self.plan_arguments(problem, dtype),
            num_kv_splits=problem.hints.num_kv_splits,
            tile_kv=problem.hints.tile_kv,
            rows_per_union=self.rows_per_union,
        )

    def plan_arguments(self, problem: ProblemView, dtype: torch.dtype) -> dict[str, Any]:
        spec, lists = problem.spec, problem.spec.candidates
        refuse_inexpressible(spec)
        if not self.plans_on_device:
            problem = dataclasses.replace(problem, device="cpu")
        return {
            "qo_indptr": problem.tensor(spec.qo_indptr),
            "seqlen_kv": problem.tensor(spec.seqlen_kv),
            "page_table": problem.tensor(spec.cache.page_table),
            "page_size": spec.cache.page_size,
            "num_pages": spec.cache.num_pages,
            "num_qo_heads": spec.num_qo_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim_qk": spec.head_dim_qk,
            "head_dim_vo": spec.head_dim_vo,
            "sm_scale": spec.sm_scale,
            "dtype": dtype,
            "device": self.device,
            "q_offset": problem.tensor(spec.q_offset),
            "candidates": None if lists is None else self.candidate_lists(problem),
            "window": None if lists is None else lists.window,
            "num_sink_tokens": 0 if lists is None else lists.num_sink_tokens,
            "mask_rule": None if spec.mask_rule is None else self.lower(spec.mask_rule),
            "score_rules": [self.lower(rule) for rule in spec.score_rules],
            "sink_logits": sink_tensor(spec, self.device),
            "layout": spec.cache.layout,
            "k_quant": self.quantization(spec.k_quant),
            "v_quant": self.quantization(spec.v_quant),
            "dropout": None if spec.dropout is None else self.kernels.Dropout(spec.dropout.rate, spec.dropout.seed),
            "owned": None if spec.cache.owned is None else problem.tensor(spec.cache.owned, torch.bool),
        }

    def quantization(self, quant: Quantization | None) -> Any:
        """How a cache is stored, as the kernels take it."""
        return None if quant is None else self.kernels.KVQuantization(quant.format, quant.granularity)

    def candidate_lists(self, problem: ProblemView) -> Any:
        """The lists as the kernels take them."""
        lists = problem.spec.candidates
        assert lists is not None
        return self.kernels.CandidateLists(
            granularity=lists.granularity,
            block_size=lists.block_size,
            sharing=lists.sharing,
            q_block_size=lists.q_block_size,
            indptr=problem.tensor(lists.indptr),
            indices=problem.tensor(lists.indices),
        )

    def lower(self, rule: spec_rules.MaskRule | spec_rules.ScoreRule) -> Any:
        """A rule as the kernels' own descriptor of the same name."""
        if isinstance(rule, spec_rules.And | spec_rules.Or):
            return getattr(self.rules, type(rule).__name__)(tuple(self.lower(part) for part in rule.rules))
        return getattr(self.rules, type(rule).__name__)(**{f: getattr(rule, f) for f in rule.__struct_fields__})

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        handle = self.plan(problem, tensors.q.dtype)
        self.kernels.check_scale_values(handle, k_scale=tensors.k_scale, v_scale=tensors.v_scale)
        return self.run(handle, tensors)

    def run(self, handle: Any, tensors: Tensors) -> Forward:
        out, lse = self.kernels.run(
            handle,
            tensors.q,
            tensors.k_cache,
            tensors.v_cache,
            k_scale=tensors.k_scale,
            v_scale=tensors.v_scale,
            out=tensors.out,
            lse=tensors.lse,
        )
        return Forward(out, lse, path="triton", saved=Saved(handle, out, lse))

    def capture(self, handle: Any, tensors: Tensors) -> CapturedRun:
        return CapturedRun(lambda: self.run(handle, tensors), self.device)

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        saved: Saved = forward.saved
        inputs = (tensors.q, tensors.k_cache, tensors.v_cache, saved.out, saved.lse, dout)
        gradients = self.backward_kernel(
            saved.plan, *inputs, dlse=dlse, mode=self.backward_mode, score_gradients=bool(problem.spec.score_rules)
        )
        return Backward(gradients.dq, gradients.dk, gradients.dv, gradients.dsink, gradients.dscore)

    def versions(self) -> dict[str, str]:
        import triton

        return {"torch": torch.__version__, "triton": triton.__version__, "numpy": np.__version__}


class TritonDevicePlan(TritonKernels):
    """The same kernels, planned on their device from lists that lie there."""

    name = "triton-device-plan"
    plans_on_device = True


class TritonUnion(TritonKernels):
    """The same kernels, four neighbouring rows with lists of their own a tile, whether the lists overlap or not."""

    name = "triton-union"
    rows_per_union = 4


class TritonHopper(TritonKernels):
    """The same plans, their forward by TMA and wgmma even where a tile has few rows, or rows have lists of their own.

    Lists with slopes, a scale of 0 or next to it, and caches whose pages lie apart by no whole number of tokens are
    left to the other kernel, as a plan leaves them; the path of a run says so.
    """

    name = "triton-hopper"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        from attnconform.kernels.sparse_attention.hopper_choice import why_not_here
        from attnconform.kernels.sparse_attention.tuning import SMALLEST_SCALE, Choice

        missing = why_not_here(torch.device(device))
        if missing is not None:
            raise Unavailable(f"{self.name} is a kernel of the GPU: {missing}")
        self.choice = Choice(forward="hopper")
        self.smallest_scale = SMALLEST_SCALE
        numerics = {
            # rows of a union tile may have one block each of a tile of 64 keys
            dtype: replace(declared, min_tile=16, denominator_tile=128)
            for dtype, declared in declared_numerics(interpreted=False).items()
            if dtype != "float32"
        }
        self.capabilities = replace(
            self.capabilities,
            supported=EXPRESSIBLE_ON_HOPPER,
            numerics=numerics,
            has_backward=False,
            score_gradients=False,
        )

    def plan(self, problem: ProblemView, dtype: torch.dtype) -> Any:
        arguments = self.plan_arguments(problem, dtype)
        has_slopes = any(isinstance(rule, self.rules.Alibi) for rule in arguments["score_rules"])
        is_scaled = problem.spec.sm_scale >= self.smallest_scale
        if is_scaled and (arguments["candidates"] is None or not has_slopes):
            arguments["choice"] = self.choice
        return self.kernels.plan(**arguments, num_kv_splits=problem.hints.num_kv_splits)

    def run(self, handle: Any, tensors: Tensors) -> Forward:
        launches = handle.launches if handle.union is None else (handle.union,)
        for launch in launches:
            launch.prepared.pop("hopper", None)  # of an earlier run, whose caches may have lain otherwise
        done = super().run(handle, tensors)
        is_there = all("hopper" in launch.prepared for launch in launches)
        return dataclasses.replace(done, path=self.name if is_there else done.path)


class TritonAtomic(TritonKernels):
    """The same kernels, dK and dV added atomically; in parallel their sums come in any order."""

    name = "triton-atomic"
    backward_mode = "atomic"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        determinism: Determinism = "none" if device.startswith("cuda") else "run_to_run"
        self.capabilities = replace(self.capabilities, determinism=determinism)


def sink_tensor(spec: AttentionProblem, device: str) -> torch.Tensor | None:
    """Sink logits in float32, where there are any."""
    if spec.sink_logits is None:
        return None
    return torch.as_tensor(spec.sink_logits, dtype=TORCH_DTYPES["float32"], device=device)
