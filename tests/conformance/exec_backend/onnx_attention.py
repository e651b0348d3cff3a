"""ONNX Runtime in a process of its own: its CPU kernel of the operator Attention, asked one request at a time.

It speaks the exec protocol of attnconform and imports nothing of it. Candidates and mask rules become the dense mask
that the operator takes; it gives no lse and no gradients, and has no form for sink logits.
"""

import json
import sys
from functools import cache

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save_file

OPSET = 23
ELEMENTS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def one_of(*values):
    return {"type": "OneOf", "values": list(values)}


# q and k are each multiplied by the root of the scale, P is divided before it meets V; float16 is widened on the way in
NUMERICS = {"prescale": "q_and_k", "prescale_bits": 24, "norm_p": True}
HALF = {"prescale_bits": 11, "score_storage": "float16", "p_storage": "float16", "l_from_p": True}
CAPABILITIES = {
    "supported": {
        "dtype": one_of("float32", "float16"),
        "mask": one_of("none", "causal", "window", "causal_window", "prefix", "document", "causal_or_document"),
        "score": one_of("none", "softcap"),
        "sink": one_of("none"),
        "refusal": one_of(),
    },
    "numerics": {
        "float32": {"out_dtype": "float32", **NUMERICS},
        "float16": {"out_dtype": "float16", **NUMERICS, **HALF},
    },
    "returns_lse": False,
    "has_backward": False,
    "gradient_of_lse": False,
}


@cache
def session(dtype, scale, softcap):
    """A model of one node, for lengths and head counts of any size."""
    kind = ELEMENTS[dtype]
    names = ("q", "k", "v", "mask")
    node = helper.make_node("Attention", names, ["out"], scale=scale, softcap=softcap)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.BOOL if name == "mask" else kind, [None] * 4) for name in names
    ]
    graph = helper.make_graph([node], "attention", inputs, [helper.make_tensor_value_info("out", kind, [None] * 4)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def allowed(rule, request, q_idx, kv_idx):
    """Where a mask rule lets a query look; q_idx is a column of positions, kv_idx a row."""
    distance = kv_idx - q_idx
    match None if rule is None else rule["type"]:
        case None:
            return np.ones(distance.shape, dtype=bool)
        case "Causal":
            return distance <= 0
        case "Window":
            left, right = rule["left"], rule["right"]
            near = np.ones(distance.shape, dtype=bool) if left is None else distance >= -left
            return near if right is None else near & (distance <= right)
        case "PrefixLM":
            return (distance <= 0) | (kv_idx < rule["prefix_len"][request])
        case "Document":
            starts = np.asarray(rule["starts"][request])
            return np.searchsorted(starts, kv_idx, side="right") == np.searchsorted(starts, q_idx, side="right")
        case "And":
            return np.logical_and.reduce([allowed(inner, request, q_idx, kv_idx) for inner in rule["rules"]])
        case "Or":
            return np.logical_or.reduce([allowed(inner, request, q_idx, kv_idx) for inner in rule["rules"]])
    raise ValueError(f"the mask rule {rule['type']} is not declared")


def listed(problem, arrays, request, q_idx, seqlen_kv):
    """(num_qo_heads, seqlen_q, seqlen_kv) True where a row lists a position."""
    lists, heads = problem["candidates"], problem["num_qo_heads"]
    seqlen_q = len(q_idx)
    if lists is None:
        return np.ones((heads, seqlen_q, seqlen_kv), dtype=bool)
    per_block = {"query_head": heads, "kv_head": problem["num_kv_heads"], "shared": 1}[lists["sharing"]]
    lengths = np.diff(arrays["qo_indptr"])
    first = int((-(-lengths[:request] // lists["q_block_size"])).sum()) * per_block
    indptr, indices = arrays["candidate_indptr"], arrays["candidate_indices"]
    distance = q_idx[:, None] - np.arange(seqlen_kv)
    local = (distance >= 0) & (distance < lists["window"]) | (np.arange(seqlen_kv) < lists["num_sink_tokens"])
    mask = np.broadcast_to(local, (heads, seqlen_q, seqlen_kv)).copy()
    for head in range(heads):
        for row in range(seqlen_q):
            at = first + row // lists["q_block_size"] * per_block + head * per_block // heads
            ids = indices[indptr[at] : indptr[at + 1]]
            blocks = np.unique(ids[ids >= 0])
            tokens = (blocks[:, None] * lists["block_size"] + np.arange(lists["block_size"])).ravel()
            mask[head, row, tokens[tokens < seqlen_kv]] = True
    return mask


def attend(problem, arrays, request):
    """(seqlen_q, num_qo_heads, head_dim_vo) of one request."""
    rows = slice(*(int(x) for x in arrays["qo_indptr"][request : request + 2]))
    q, seqlen_kv = arrays["q"][rows], int(arrays["seqlen_kv"][request])
    if not len(q) or not seqlen_kv:
        return np.zeros((len(q), q.shape[1], problem["head_dim_vo"]), dtype=q.dtype)
    positions = np.arange(seqlen_kv)
    pages, offsets = arrays["page_table"][request, positions // problem["page_size"]], positions % problem["page_size"]
    k, v = (
        cache[pages, offsets] if problem["layout"] == "NHD" else cache[pages, :, offsets]
        for cache in (arrays["k_cache"], arrays["v_cache"])
    )
    q_idx = int(arrays["q_offset"][request]) + np.arange(len(q))
    mask = listed(problem, arrays, request, q_idx, seqlen_kv)
    mask &= allowed(problem["mask_rule"], request, q_idx[:, None], positions[None])
    caps = [rule["cap"] for rule in problem["score_rules"]]
    run = session(q.dtype.name, problem["sm_scale"], caps[0] if caps else 0.0).run
    given = {name: np.ascontiguousarray(x.swapaxes(0, 1)[None]) for name, x in (("q", q), ("k", k), ("v", v))}
    return run(None, given | {"mask": mask[None]})[0][0].swapaxes(0, 1)


def forward(message):
    """Answers run."""
    arrays, problem = load_file(message["inputs"]), message["problem"]
    batch = len(arrays["seqlen_kv"])
    out = np.concatenate([attend(problem, arrays, n) for n in range(batch)]) if batch else arrays["q"]
    save_file({"out": np.ascontiguousarray(out)}, message["outputs"])
    return {"type": "ran", "id": message["id"], "path": "onnxruntime"}


def answer(message):
    """The reply to one message."""
    match message["type"]:
        case "start":
            versions = {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}
            return {"type": "started", "protocol": 1, "name": "ONNX Runtime Attention", "versions": versions}
        case "capabilities":
            return {"type": "capabilities", "capabilities": CAPABILITIES}
        case "run":
            return forward(message)
        case "stop":
            return {"type": "stopped"}
    raise ValueError(f"knows no request {message['type']!r}")


def main():
    for line in sys.stdin:
        message = {}
        try:
            message = json.loads(line)
            reply = answer(message)
        except Exception as error:
            reply = {"type": "failed", "message": f"{type(error).__name__}: {error}", "id": message.get("id")}
        print(json.dumps(reply), flush=True)
        if reply["type"] == "stopped":
            return


if __name__ == "__main__":
    main()
