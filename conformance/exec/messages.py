"""Every message of the protocol, as msgspec structs; protocol.schema.json is made of them. [SAFE-PATH]

A number that is not finite travels as null, because JSON has no other way: a problem with one must be refused.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from attnconform.conformance.backend import Capabilities
from attnconform.conformance.views import Hints
from attnconform.reference.candidates import Form, Granularity, Sharing
from attnconform.reference.dropout import Dropout
from attnconform.reference.epilogue import EpilogueStep
from attnconform.reference.problem import AttentionProblem, EmptyRow
from attnconform.reference.quantization import QuantFormat, Quantization, ScaleGranularity
from attnconform.reference.rope import Rope
from attnconform.reference.rules import MaskRule, ScoreRule

PROTOCOL_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("protocol.schema.json")


class CandidatesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the tensors candidate_indptr and candidate_indices are to be read."""

    granularity: Granularity
    block_size: int
    sharing: Sharing
    q_block_size: int
    window: int
    num_sink_tokens: int
    form: Form


class QuantOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a cache is stored; its scales are the tensor k_scale or v_scale."""

    format: QuantFormat
    granularity: ScaleGranularity


class ProblemMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the answer and is no array."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    num_pages: int
    layout: Literal["NHD", "HND"]
    sm_scale: float | None  # null where it is not finite
    candidates: CandidatesOptions | None = None  # null: every committed position
    mask_rule: MaskRule | None = None
    score_rules: tuple[ScoreRule, ...] = ()
    empty_row: EmptyRow = "zero"
    k_quant: QuantOptions | None = None
    v_quant: QuantOptions | None = None
    dropout: Dropout | None = None
    rope: Rope | None = None
    epilogue: tuple[EpilogueStep, ...] = ()
    hints: Hints = Hints()  # may be ignored, and may never change the answer


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first request."""

    protocol: int = PROTOCOL_VERSION
    device: str


class AskCapabilities(msgspec.Struct, frozen=True, kw_only=True, tag="capabilities"):
    """The second request."""


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Asks for a forward call."""

    id: int
    problem: ProblemMessage
    inputs: str  # path of a safetensors file
    outputs: str  # path at which the program writes one, with out and, where it declares lse, lse


class BackwardRequest(msgspec.Struct, frozen=True, kw_only=True, tag="backward"):
    """Asks for a backward call; the inputs hold the forward's out and lse, dout and, where taken, dlse."""

    id: int
    problem: ProblemMessage
    inputs: str
    outputs: str  # with dq, dk, dv and, where the problem has sink logits, dsink; dscore_0, dscore_1 where declared


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The last request: the program answers and ends with exit code 0."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """Answers start."""

    protocol: int
    name: str
    versions: dict[str, str] = {}  # name -> version, for the report


class Declared(msgspec.Struct, frozen=True, kw_only=True, tag="capabilities"):
    """Answers capabilities."""

    capabilities: Capabilities


class Ran(msgspec.Struct, frozen=True, kw_only=True, tag="ran"):
    """Answers run and backward: the outputs are written."""

    id: int
    path: str = "native"  # which code ran; anything that starts with "fallback" is one


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Answers run: the problem breaks the contract, and nothing was written."""

    id: int
    clause: str
    message: str  # one line that names the thing and its value


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Answers anything: it could not be done, and the program is still well."""

    message: str  # one line
    id: int | None = None  # of the run or backward; null otherwise
    out_of_memory: bool = False


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag="stopped"):
    """Answers stop."""


Request = Start | AskCapabilities | RunRequest | BackwardRequest | Stop
Reply = Started | Declared | Ran | Refused | Failed | Stopped


def describe(problem: AttentionProblem, hints: Hints) -> ProblemMessage:
    """A problem without its arrays."""
    lists = problem.candidates
    return ProblemMessage(
        num_qo_heads=problem.num_qo_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim_qk=problem.head_dim_qk,
        head_dim_vo=problem.head_dim_vo,
        page_size=problem.cache.page_size,
        num_pages=problem.cache.num_pages,
        layout=problem.cache.layout,
        sm_scale=problem.sm_scale,
        candidates=None
        if lists is None
        else CandidatesOptions(
            granularity=lists.granularity,
            block_size=lists.block_size,
            sharing=lists.sharing,
            q_block_size=lists.q_block_size,
            window=lists.window,
            num_sink_tokens=lists.num_sink_tokens,
            form=lists.form,
        ),
        mask_rule=problem.mask_rule,
        score_rules=problem.score_rules,
        empty_row=problem.empty_row,
        k_quant=describe_storage(problem.k_quant),
        v_quant=describe_storage(problem.v_quant),
        dropout=problem.dropout,
        rope=problem.rope,
        epilogue=problem.epilogue,
        hints=hints,
    )


def describe_storage(quantization: Quantization | None) -> QuantOptions | None:
    """A quantized cache without its scales."""
    if quantization is None:
        return None
    return QuantOptions(format=quantization.format, granularity=quantization.granularity)


def protocol_schema() -> dict[str, Any]:
    """The JSON schema of the protocol: `#/$defs/Request` and `#/$defs/Reply` are one line each way."""
    (request, reply), definitions = msgspec.json.schema_components((Request, Reply), ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"attnconform exec protocol, version {PROTOCOL_VERSION}",
        "$defs": {**dict(sorted(definitions.items())), "Request": request, "Reply": reply},
    }


def schema_text() -> str:
    """The exported schema, as it is packaged."""
    encoded = msgspec.json.encode(protocol_schema(), order="deterministic")
    return msgspec.json.format(encoded, indent=1).decode() + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
