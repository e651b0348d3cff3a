"""A frozen vector: a tiny problem, its numbers, the right answer, and the mistake it shows. fixtures/FORMAT.md"""

import math
from typing import Literal

import msgspec
import numpy as np

from attnconform.conformance.cases.structure import Structure
from attnconform.reference.coordinates import FloatArray

FORMAT_VERSION = 1


class Array(msgspec.Struct, frozen=True):
    """An array in C order; "inf", "-inf" and "nan" stand for what JSON numbers cannot hold."""

    shape: tuple[int, ...]
    data: tuple[float | Literal["inf", "-inf", "nan"], ...]

    def numpy(self) -> FloatArray:
        return np.array([float(x) for x in self.data]).reshape(self.shape)


def to_array(values: FloatArray) -> Array:
    """Every float64 in its shortest decimal form, which reads back to the same bits."""
    flat = [float(x) for x in np.ravel(values)]
    return Array(tuple(values.shape), tuple(x if math.isfinite(x) else special(x) for x in flat))


def special(x: float) -> Literal["inf", "-inf", "nan"]:
    """The word for a number that is not finite."""
    if math.isnan(x):
        return "nan"
    return "inf" if x > 0 else "-inf"


class Refusal(msgspec.Struct, frozen=True):
    """What a refusal must name."""

    clause: str
    name: str
    value: str
    index: tuple[int, ...] | None


class Vector(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fixture file."""

    format: int = msgspec.field(default=FORMAT_VERSION)
    path: str  # of this file, relative to fixtures/
    kind: Literal["forward", "backward", "refusal", "worked"]
    clause: str
    fault_class: str  # the mistake this vector catches
    effect: str  # what the mistake does
    bug: str = ""  # a public report of the mistake
    structure: Structure | None = None
    tensors: dict[str, Array] = {}  # q; k and v by slot; dout and dlse where gradients are expected
    given: dict[str, Array] = {}  # the inputs of a worked example
    expected: dict[str, Array] = {}
    bound: dict[str, Array] = {}  # |got - expected| may not exceed this; float32 with float32 accumulation
    wrong: dict[str, Array] = {}  # what the mistake gives
    detectability: float | None = None  # largest |wrong - expected| / bound; at least 2, null where it is infinite
    refusal: Refusal | None = None


def encode_vector(vector: Vector) -> bytes:
    return msgspec.json.encode(vector, order="deterministic") + b"\n"


def decode_vector(data: bytes, source: str) -> Vector:
    """A vector. Raises ValueError naming the source where it is not one."""
    try:
        vector = msgspec.json.decode(data, type=Vector)
    except msgspec.DecodeError as error:
        raise ValueError(f"{source} is not a fixture: {error}") from None
    if vector.format != FORMAT_VERSION:
        raise ValueError(f"{source}: format is {vector.format}, but this reads {FORMAT_VERSION}")
    return vector
