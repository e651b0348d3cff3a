"""The exported schema is that of the code, and every message of a conversation answers to it."""

import json
from importlib import resources

import jsonschema
import msgspec
import numpy as np
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import build_problem
from attnconform.conformance.exec.messages import (
    SCHEMA_FILE,
    AskCapabilities,
    BackwardRequest,
    Declared,
    Failed,
    ProblemMessage,
    Ran,
    Refused,
    RunRequest,
    Start,
    Started,
    Stop,
    Stopped,
    describe,
    schema_text,
)


def validator(kind):
    schema = json.loads(SCHEMA_FILE.read_text())
    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{kind}", **schema})


def as_json(message):
    return json.loads(msgspec.json.encode(message))


PROBLEMS = [describe(build_problem(c.structure), c.structure.hints) for c in matrix("L1") if c.operation != "structure"]


def test_the_exported_schema_is_that_of_the_messages():
    assert SCHEMA_FILE.read_text() == schema_text(), "write it anew: python -m attnconform.conformance.exec.messages"


def test_schema_and_page_are_packaged():
    folder = resources.files("attnconform.conformance.exec")
    assert folder.joinpath("protocol.schema.json").is_file()
    assert "protocol, version 1" in folder.joinpath("PROTOCOL.md").read_text()


@pytest.mark.parametrize(
    "message",
    [
        Start(device="cpu"),
        AskCapabilities(),
        RunRequest(id=1, problem=PROBLEMS[0], inputs="a", outputs="b"),
        BackwardRequest(id=2, problem=PROBLEMS[-1], inputs="a", outputs="b"),
        Stop(),
    ],
)
def test_requests_answer_to_the_schema(message):
    validator("Request").validate(as_json(message))


@pytest.mark.parametrize(
    "message",
    [
        Started(protocol=1, name="x", versions={"x": "1"}),
        Declared(capabilities=StepsBackend.capabilities),
        Ran(id=1),
        Refused(id=1, clause="SET-RANGE", message="candidate is 9"),
        Failed(message="no"),
        Stopped(),
    ],
)
def test_replies_answer_to_the_schema(message):
    validator("Reply").validate(as_json(message))


def test_every_problem_of_the_matrix_travels_whole_but_for_numbers_that_json_has_not():
    check = validator("ProblemMessage")
    for problem in PROBLEMS:
        encoded = msgspec.json.encode(problem)
        if np.isfinite(problem.sm_scale) and b"null," not in encoded.split(b'"score_rules"')[1]:
            assert msgspec.json.decode(encoded, type=ProblemMessage) == problem
            check.validate(json.loads(encoded))


@pytest.mark.parametrize("text", ["{}", '{"type":"ran"}', '{"type":"ran","id":"one"}', '{"type":"none"}'])
def test_what_is_no_reply_fails_the_schema(text):
    assert not validator("Reply").is_valid(json.loads(text))
