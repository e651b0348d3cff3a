"""ONNX Runtime on a CPU: its operators Attention, GroupQueryAttention and SparseAttention, each a model of one node.

None gives an lse or gradients. They read gathered keys and values, one request at a time.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnconform.conformance.adapters.per_request import Attended, PerRequest
from attnconform.conformance.adapters.placement import causal_places, rows_of_calls
from attnconform.conformance.adapters.sdpa import additive_mask
from attnconform.conformance.backend import Capabilities, OneOf, Unavailable
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.views import ProblemView
from attnconform.reference.rules import And, Causal, SoftCap, Window

ONNX_OPSET, IR_VERSION = 23, 10  # the first that has Attention; a newer one than the runtime knows is refused by it
CONTRIB = "com.microsoft"
BLOCK_SIZE = 16  # of OrtSparse where nothing is listed
SAME_HEAD_DIM = OneOf(("64/64", "128/128", "80/80", "96/96", "256/256"))
# q and k are each multiplied by the root of the scale, and P is divided before it meets V
FLOAT32 = Numerics(out_dtype="float32", prescale="q_and_k", prescale_bits=24, norm_p=True)
FLOAT16 = Numerics(
    out_dtype="float16", prescale="q_and_k", prescale_bits=11, score_storage="float16", p_storage="float16",
    norm_p=True, l_from_p=True,
)  # fmt: skip
CAPABILITIES = Capabilities(
    supported={
        "dtype": OneOf(("float32", "float16")),
        # scores are capped before a bias is added: the other order cannot be said
        "score": OneOf(("none", "alibi", "relative", "softcap", "softcap_relative")),
        "sink": OneOf(("none",)),
        # lists and tables are checked by the suite's own views: none of these refusals would be ONNX Runtime's
        "refusal": OneOf(()),
    },
    numerics={"float32": FLOAT32, "float16": FLOAT16},
    returns_lse=False,
    has_backward=False,
    gradient_of_lse=False,
)


def libraries() -> tuple[Any, Any]:
    """onnx and onnxruntime. Raises Unavailable where one is missing."""
    try:
        import onnx
        import onnxruntime
    except ModuleNotFoundError as error:
        raise Unavailable("ONNX Runtime is not here: pip install 'attnconform[onnx]'") from error
    return onnx, onnxruntime


@cache
def session(operator: str, dtype: torch.dtype, inputs: tuple[str, ...], **attributes: float) -> Any:
    """A model of one node for tensors of any shape; an input without a name is left out."""
    onnx, onnxruntime = libraries()
    number = onnx.TensorProto.FLOAT if dtype == torch.float32 else onnx.TensorProto.FLOAT16
    kinds = {"attn_mask": onnx.TensorProto.BOOL if attributes.pop("is_bool", False) else number}
    kinds |= dict.fromkeys(("seqlens", "total", "block_rows", "block_columns"), onnx.TensorProto.INT32)
    domain = "" if operator == "Attention" else CONTRIB
    outputs = ["out"] if operator == "Attention" else ["out", "present_key", "present_value"]
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(operator, inputs, outputs, domain=domain, **attributes)],
        operator,
        [info(name, kinds.get(name, number), None) for name in inputs if name],
        [info(name, number, None) for name in outputs],
    )
    opsets = [onnx.helper.make_opsetid("", ONNX_OPSET), onnx.helper.make_opsetid(CONTRIB, 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def call(model: Any, **inputs: Tensor) -> Tensor:
    """The first output."""
    given = {name: tensor.contiguous().numpy() for name, tensor in inputs.items()}
    return torch.from_numpy(model.run(["out"], given)[0])


def soft_cap(problem: ProblemView) -> float:
    """The cap of the scores, 0 for none."""
    return next((float(rule.cap) for rule in problem.spec.score_rules if isinstance(rule, SoftCap)), 0.0)


def bias_of(problem: ProblemView, request: int) -> Tensor:
    """What is added to capped scores, -inf where a row does not attend."""
    rules = tuple(rule for rule in problem.spec.score_rules if not isinstance(rule, SoftCap))
    return additive_mask(replace(problem, spec=replace(problem.spec, score_rules=rules)), request)


def with_a_key(x: Tensor) -> Tensor:
    """(heads, length, head_dim), ones where the length is 0: no operator takes a request without keys.

    No row attends it. Ones, for an operator that counts it all the same must not be right by chance.
    """
    return x if x.shape[1] else pad(x, (0, 0, 1, 0), value=1.0)


class OnnxRuntime(PerRequest):
    """What the three have in common."""

    def __init__(self, device: str = "cpu") -> None:
        if device != "cpu":
            raise Unavailable(f"{self.name} is an operator of the CPU, but device is {device!r}")
        super().__init__(device)
        libraries()

    def versions(self) -> dict[str, str]:
        onnx, onnxruntime = libraries()
        return {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}


class OrtAttention(OnnxRuntime):
    """The standard's operator, which takes any mask: boolean, or added to the scores where there is a bias."""

    name = "ort-attention"
    capabilities = CAPABILITIES

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        biased = any(not isinstance(rule, SoftCap) for rule in problem.spec.score_rules)
        mask = bias_of(problem, request).to(q.dtype) if biased else problem.masks[request]
        k, v = (with_a_key(x) for x in (k, v))
        mask = pad(mask, (k.shape[1] - mask.shape[2], 0), value=float("-inf") if biased else False)
        attributes = {"scale": problem.spec.sm_scale, "softcap": soft_cap(problem), "is_bool": not biased}
        model = session("Attention", q.dtype, ("q", "k", "v", "attn_mask"), **attributes)
        out = call(model, q=q[None], k=k[None], v=v[None], attn_mask=mask[None])
        return Attended(out[0], None, "Attention")


class OrtGroupQuery(OnnxRuntime):
    """The operator of decoder models: a past and new keys, a causal mask and a window of its own, sinks.

    Other masks are biases of -inf. The last keys are given as the new ones, as many as there are query rows.
    """

    name = "ort-gqa"
    capabilities = msgspec.structs.replace(
        CAPABILITIES,
        supported={**CAPABILITIES.supported, "sink": OneOf(("none", "logits")), "head_dim": SAME_HEAD_DIM},
    )

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        spec, rows = problem.spec, q.shape[1]
        room = max(rows - k.shape[1], 0)  # the operator takes no fewer keys than rows: those in front are masked
        k, v = (pad(x, (0, 0, room, 0)) for x in (k, v))
        length = k.shape[1]
        window = None if room else own_window(problem, request, rows, length)
        attributes: dict[str, float] = {"causal": window is not None}
        attributes["local_window_size"] = -1 if window is None else window
        attributes |= {"num_heads": spec.num_qo_heads, "kv_num_heads": spec.num_kv_heads}
        attributes |= {"scale": spec.sm_scale, "softcap": soft_cap(problem)}
        given = {"q": by_token(q), "k": by_token(k[:, length - rows :]), "v": by_token(v[:, length - rows :])}
        given |= {"past_key": k[None, :, : length - rows], "past_value": v[None, :, : length - rows]}
        given |= {"seqlens": torch.tensor([length - 1], dtype=torch.int32), "total": torch.tensor(length).int()}
        if window is None:
            given["bias"] = pad(bias_of(problem, request), (room, 0), value=float("-inf")).to(q.dtype)[None]
        if spec.sink_logits is not None:
            given["sinks"] = torch.as_tensor(spec.sink_logits).to(q.dtype)
        names = ("q", "k", "v", "past_key", "past_value", "seqlens", "total", "", "", "", "bias", "sinks")
        used = tuple(name if name in given else "" for name in names)
        out = call(session("GroupQueryAttention", q.dtype, used, **attributes), **given)
        return Attended(by_head(out, spec.num_qo_heads), None, "bias" if window is None else "causal")


def own_window(problem: ProblemView, request: int, seqlen_q: int, seqlen_kv: int) -> int | None:
    """local_window_size of a problem that the operator's own causal mask says, -1 for no window; None for others."""
    spec = problem.spec
    biased = any(not isinstance(rule, SoftCap) for rule in spec.score_rules)
    if spec.candidates is not None or biased or int(spec.q_offset[request]) != seqlen_kv - seqlen_q:
        return None
    match spec.mask_rule:
        case Causal():
            return -1
        case And((Causal(), Window(left=int(left), right=None))):
            return left + 1  # the query's own key counts
    return None


def by_token(x: Tensor) -> Tensor:
    """(heads, length, head_dim) as (1, length, heads * head_dim)."""
    return x.transpose(0, 1).flatten(1)[None]


def by_head(out: Tensor, num_heads: int) -> Tensor:
    """The inverse of `by_token`."""
    return out[0].unflatten(1, (num_heads, -1)).transpose(0, 1)


class OrtSparse(OnnxRuntime):
    """Block-sparse attention with a layout for each head; always causal, over a cache that it appends to.

    A layout has a row for each block of queries. Where the rows of a request list the same, they are one call, else
    each is a call of its own.
    """

    name = "ort-sparse"
    capabilities = msgspec.structs.replace(
        CAPABILITIES,
        supported={
            **CAPABILITIES.supported,
            "score": OneOf(("none",)),
            "head_dim": SAME_HEAD_DIM,
            "mask": OneOf(("none", "causal")),
            "granularity": OneOf(("dense", "block")),
            "local": OneOf(("none",)),
        },
    )

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        lists = problem.spec.candidates
        size = BLOCK_SIZE if lists is None else lists.block_size
        k, v = (with_a_key(x) for x in (k, v))
        listed = pad(problem.candidate_masks[request], (k.shape[1] - int(problem.spec.seqlen_kv[request]), 0))
        blocks = pad(listed, (0, -listed.shape[2] % size)).unflatten(2, (-1, size)).any(dim=3)
        places = causal_places(problem, request)
        # a row before the first key stands at it, and lists nothing
        blocks = blocks.masked_fill(torch.tensor(places)[:, None] < 0, False)
        places = [max(place, 0) for place in places]
        outs = [
            self.attend_rows(problem, q[:, rows], k, v, blocks[:, rows.start], places[rows.start], size)
            for rows in rows_of_calls(places, together=bool((blocks == blocks[:, :1]).all()))
        ]
        return Attended(torch.cat(outs, dim=1), None, "SparseAttention")

    def attend_rows(
        self, problem: ProblemView, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, past: int, size: int
    ) -> Tensor:
        """Rows that list the same blocks, (num_qo_heads, num_blocks) True where listed; the first is at `past`."""
        spec, end = problem.spec, past + q.shape[1]
        attributes = {"num_heads": spec.num_qo_heads, "kv_num_heads": spec.num_kv_heads, "scale": spec.sm_scale}
        names = ("q", "k", "v", "past_key", "past_value", "block_rows", "block_columns", "total", "seqlens")
        model = session("SparseAttention", q.dtype, names, sparse_block_size=size, **attributes)
        given = {"q": by_token(q), "k": by_token(k[:, past:end]), "v": by_token(v[:, past:end]), **layout(blocks)}
        given |= {"total": torch.tensor([end]).int(), "seqlens": torch.tensor([end]).int()}
        room = (0, 0, 0, blocks.shape[1] * size - k.shape[1])
        out = call_in_place(model, given, {"key": pad(k, room)[None], "value": pad(v, room)[None]})
        return by_head(out, spec.num_qo_heads)


def layout(blocks: Tensor) -> dict[str, Tensor]:
    """CSR of one list a head in every row; below the diagonal, for it counts entries to see what is dense."""
    heads, width = blocks.shape
    lower = blocks[:, None] & torch.ones(width, width, dtype=torch.bool).tril()
    ends = lower.sum(dim=2).cumsum(dim=1)
    columns = torch.full((heads, int(ends.max())), -1, dtype=torch.int32)
    for head in range(heads):
        listed = lower[head].nonzero()[:, 1]
        columns[head, : len(listed)] = listed.int()
    return {"block_rows": pad(ends, (1, 0)).int(), "block_columns": columns}


def call_in_place(model: Any, inputs: dict[str, Tensor], cache: dict[str, Tensor]) -> Tensor:
    """The output of an operator whose past and present are one buffer."""
    _, onnxruntime = libraries()
    binding = model.io_binding()
    arrays = {name: tensor.contiguous().numpy() for name, tensor in inputs.items()}  # a binding keeps no reference
    for name, array in arrays.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("out")
    for name, tensor in cache.items():
        buffer = onnxruntime.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())
        binding.bind_ortvalue_input(f"past_{name}", buffer)
        binding.bind_ortvalue_output(f"present_{name}", buffer)
    model.run_with_iobinding(binding)
    return torch.from_numpy(binding.copy_outputs_to_cpu()[0])
