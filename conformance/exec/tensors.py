"""Tensors on their way to a program and back, as safetensors files."""

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from attnconform.conformance.backend import Tensors
from attnconform.conformance.exec.program import ProtocolError, one_line
from attnconform.reference.problem import AttentionProblem


def problem_arrays(problem: AttentionProblem) -> dict[str, torch.Tensor]:
    """Every array of a problem under its name: int64, float64 for logits and biases, float32 for scales."""
    cache, lists = problem.cache, problem.candidates
    arrays = {
        "qo_indptr": problem.qo_indptr,
        "seqlen_kv": problem.seqlen_kv,
        "q_offset": problem.q_offset,
        "page_table": cache.page_table,
        "head_pages": cache.head_pages,
        "page_owned": cache.owned,
        "sink_logits": problem.sink_logits,
    }
    if lists is not None:
        arrays |= {
            "candidate_indptr": lists.indptr,
            "candidate_indices": lists.indices,
            "candidate_rank_bias": lists.rank_bias,
        }
    return {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items() if a is not None}


def write_inputs(path: Path, problem: AttentionProblem, tensors: Tensors, **more: torch.Tensor | None) -> None:
    """Writes all that a call is given; caches in their layout without gaps, whatever their strides were."""
    given = {"q": tensors.q, "k_cache": tensors.k_cache, "v_cache": tensors.v_cache, **more}
    given |= {"k_scale": tensors.k_scale, "v_scale": tensors.v_scale}
    named = {name: tensor for name, tensor in given.items() if tensor is not None}
    save_file({k: v.detach().cpu().contiguous() for k, v in (problem_arrays(problem) | named).items()}, path)


def read_outputs(path: Path, wanted: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    """The outputs by name. Raises ProtocolError where the file, a shape or a dtype is not as agreed."""
    try:
        found = load_file(path)
    except FileNotFoundError:
        raise ProtocolError(f"wrote no {path.name}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ProtocolError(f"wrote a {path.name} that is no safetensors file: {one_line(str(error))}") from None
    for name, (shape, dtype) in wanted.items():
        if name not in found:
            raise ProtocolError(f"wrote no {name}, but {', '.join(sorted(found)) or 'nothing'}")
        if tuple(found[name].shape) != shape or found[name].dtype != dtype:
            got = f"{found[name].dtype} {tuple(found[name].shape)}"
            raise ProtocolError(f"wrote {name} as {got}, but it must be {dtype} {shape}")
    return {name: found[name] for name in wanted}
