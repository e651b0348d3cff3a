"""Recomputes every frozen vector from the reference."""

import json
from importlib import resources
from importlib.resources.abc import Traversable

import jsonschema
import numpy as np

from attnconform.conformance.cases.structure import build_problem
from attnconform.conformance.golden.vector import Vector, decode_vector
from attnconform.conformance.golden.worked import worked_vectors
from attnconform.reference.attention import attention, attention_gradients
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import check_problem

AGREEMENT = 2.0**-40  # of the largest value: another processor's libm may round the last bits of exp differently


def fixtures_folder() -> Traversable:
    return resources.files("attnconform.fixtures")


def read_manifest() -> list[str]:
    """Paths of all vectors, relative to fixtures/."""
    paths: list[str] = json.loads(fixtures_folder().joinpath("manifest.json").read_text())["vectors"]
    return paths


def fault_of(path: str) -> str | None:
    """What is wrong with one vector file, in one line; None where nothing is."""
    data = fixtures_folder().joinpath(path).read_bytes()
    schema = json.loads(fixtures_folder().joinpath("schema.json").read_text())
    try:
        jsonschema.validate(json.loads(data), schema)
        vector = decode_vector(data, path)
    except (jsonschema.ValidationError, ValueError) as error:
        return f"{path}: {str(error).splitlines()[0]}"
    if vector.path != path:
        return f"{path} says that its path is {vector.path}"
    return {"refusal": refusal_fault, "worked": worked_fault}.get(vector.kind, numbers_fault)(vector)


def refusal_fault(vector: Vector) -> str | None:
    """Whether the reference refuses the problem as the vector says."""
    assert vector.structure is not None
    assert vector.refusal is not None
    try:
        check_problem(build_problem(vector.structure))
    except RefusedInput as refused:
        got = (refused.clause, refused.name, str(refused.value), refused.index)
        want = (vector.refusal.clause, vector.refusal.name, vector.refusal.value, vector.refusal.index)
        return None if got == want else f"{vector.path}: refused with {got}, want {want}"
    return f"{vector.path}: not refused"


def worked_fault(vector: Vector) -> str | None:
    """Whether the reference still gives the worked numbers."""
    fresh = next((v for v in worked_vectors() if v.path == vector.path), None)
    if fresh is None:
        return f"{vector.path}: no worked example of that name"
    return differences(vector, {name: array.numpy() for name, array in fresh.expected.items()})


def numbers_fault(vector: Vector) -> str | None:
    """Whether the reference gives the expected numbers, and whether the mistake stands clear of the bound."""
    assert vector.structure is not None
    fault = differences(vector, recomputed(vector))
    if fault is not None:
        return fault
    ratio = max(excess(vector, name) for name in vector.expected)
    if not ratio >= 2:
        return f"{vector.path}: the wrong numbers are within {ratio:.3g} bounds of the right ones"
    return None


def recomputed(vector: Vector) -> dict[str, FloatArray]:
    """The reference's numbers for a vector's problem."""
    assert vector.structure is not None
    problem = build_problem(vector.structure)
    tensors = {name: array.numpy() for name, array in vector.tensors.items()}
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    result = attention(problem, q, k, v)
    numbers = {"out": result.out, "lse": result.lse}
    if vector.kind == "backward":
        gradients = attention_gradients(problem, q, k, v, tensors["dout"], tensors["dlse"])
        dk, dv = gradients.in_pool(problem.cache.num_slots)
        numbers |= {"dq": gradients.dq, "dk": dk, "dv": dv}
        if gradients.dsink is not None:
            numbers["dsink"] = gradients.dsink
        numbers |= {f"dscore{i}": gradient for i, gradient in enumerate(gradients.dscore)}
    return numbers


def differences(vector: Vector, numbers: dict[str, FloatArray]) -> str | None:
    """The first expected array that the numbers do not match."""
    for name, array in vector.expected.items():
        want, got = array.numpy(), numbers[name]
        scale = float(np.abs(want[np.isfinite(want)]).max(initial=1.0))
        if got.shape != want.shape or not np.allclose(got, want, rtol=0, atol=AGREEMENT * scale, equal_nan=True):
            return f"{vector.path}: expected {name} is not what the reference gives"
    return None


def excess(vector: Vector, name: str) -> float:
    """How many bounds the wrong numbers of one output are from the right ones."""
    if name not in vector.wrong or name not in vector.bound:
        return 0.0
    want, wrong, bound = vector.expected[name].numpy(), vector.wrong[name].numpy(), vector.bound[name].numpy()
    same = (want == wrong) | (np.isnan(want) & np.isnan(wrong))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(same, 0.0, np.abs(wrong - want) / bound)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max(initial=0.0))
