"""A single file that reproduces a failure: problem, inputs, right numbers, and attention in plain numpy.

Of a problem that must be refused: the problem, and what of it is out of range.
"""

from pathlib import Path

import jinja2
import msgspec
import numpy as np

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.structure import Case, build_problem, decode_case
from attnconform.conformance.cases.values import Values
from attnconform.conformance.explain.answer import Answer, Make, Numbers
from attnconform.conformance.explain.evidence import Script
from attnconform.conformance.explain.rank import comparisons
from attnconform.conformance.explain.telling import Telling, array_text, literal
from attnconform.conformance.judge.judge import judge_case, undeclared
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.report.text import finding_text
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.steps import Steps

COMPARED = ("first", "backward")  # calls whose numbers have a right answer in the script
TOLD = ("out", "lse", "dq", "dk", "dv", "dsink")  # those numbers, by name
REPEATED = {"other poison": "first", "unselected": "first", "again": "first", "backward again": "backward"}
NOTES = {
    "other poison": "other bytes in the outputs and in slots that nobody owns change the answer",
    "unselected": "other bytes in slots that no row attends change the answer",
    "again": "the same call gives other bits",
    "backward again": "the same backward gives other bits",
}


def write_reproducer(path: Path, case: Case, subject: Backend, *, backend: str, device: str) -> None:
    """Writes the script. Raises Untold for a case that it cannot tell in numpy."""
    path.write_text(reproducer_text(case, subject, backend=backend, device=device), encoding="utf-8")


def reproducer_text(case: Case, subject: Backend, *, backend: str, device: str) -> str:
    """The script, as text; it has what the case needs and no more."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attnconform.conformance.explain", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["literal"] = literal
    names = {
        "case_id": case.id,
        "case_json": msgspec.json.encode(case, order="deterministic").decode(),
        "backend": backend,
        "device": device,
    }
    if case.operation == "refusal":
        return environment.get_template("refuse.py.j2").render(names | refused_parts(case))
    return environment.get_template("reproduce.py.j2").render(names | parts(case, Trial(case, subject)))


def refused_parts(case: Case) -> dict[str, object]:
    """What the template of problems that must be refused is filled with. [SAFE-REFUSE]"""
    assert case.refuses is not None
    return {
        "s": case.structure,
        "lists": case.structure.candidates,
        "clause": case.refuses,
        "why": reason_to_refuse(case) or "its arrays do not fit one another",
    }


def reason_to_refuse(case: Case) -> str:
    """What the reference says against a problem; empty where only its tensors are wrong."""
    try:
        Steps().refuse(build_problem(case.structure))
    except RefusedInput as refused:
        return str(refused).removesuffix(f" [{refused.clause}]")
    return ""


def parts(case: Case, trial: Trial) -> dict[str, object]:
    """What the template is filled with."""
    problem, told = trial.problem, Telling(trial.problem, trial.values)
    inputs = inputs_of(trial)
    want, bound = expected(trial)
    rope = getattr(problem, "rope", None)
    rotary = rope if rope is not None and rope.turns else None
    names = [told.input_name(name) for name in inputs]
    score_lines = [line for rule in problem.score_rules for line in told.score(rule)]
    filled = {
        "s": case.structure,
        "head_pages": getattr(case.structure, "head_pages", None),
        "backward": case.operation == "backward",
        "q_offset": tuple(problem.q_offset.tolist()),
        "lists": case.structure.candidates,
        "lists_per_block": 1 if problem.candidates is None else problem.lists_per_block,
        "list_head": told.list_head(),
        "mask": told.mask(problem.mask_rule),
        "score_lines": [*score_lines, *told.ranks()],
        "kept": told.kept(),
        "epilogue_lines": told.epilogue(),
        "rotary": rotary,
        "want": [(name, array_text(array)) for name, array in want.items()],
        "bound": [(name, array_text(array)) for name, array in bound.items()],
        "input_arguments": ", ".join(names),
    }
    return filled | {"inputs": [*zip(names, map(array_text, inputs.values()), strict=True), *told.extra]}


def inputs_of(trial: Trial) -> dict[str, FloatArray]:
    """The numbers that go in, by name."""
    values = trial.values
    inputs = {"q": values.q, "k": values.k, "v": values.v}
    if trial.case.operation == "backward":
        dlse = trial.dlse(values)
        inputs |= {"dout": values.dout, "dlse": np.zeros_like(values.dlse) if dlse is None else dlse}
    return inputs


def expected(trial: Trial) -> tuple[Numbers, Numbers]:
    """What is right, and how far the backend's declared arithmetic may be from it, by name.

    For a call that the backend does not answer here the reference's answer stands in, of which only what is right and
    the bounds are used: in another process the backend may answer, and is held to them.
    """
    calls = COMPARED if trial.case.operation == "backward" else COMPARED[:1]
    answers = compared_answers(trial.case, lambda: trial.backend)
    if len(answers) < len(calls):
        answers = compared_answers(trial.case, StepsBackend) | answers
    told = [c for answer in answers.values() for c in comparisons(trial, answer) if c.name in TOLD]
    return {c.name: c.want for c in told}, {c.name: c.worst for c in told}


def compared_answers(case: Case, make: Make) -> dict[str, Answer]:
    """A backend's answers to the calls that have a right one, by call."""
    return {answer.call: answer for answer in Script(case).answers(make) if answer.call in COMPARED}


def why_unasked(case_json: str, backend: str, device: str) -> str:
    """Why a backend is not asked a case, which its declaration leaves out; empty where it is."""
    subject = load_backend(backend, device)
    try:
        outside = undeclared(decode_case(case_json.encode(), "CASE"), subject)
    finally:
        subject.close()
    return "" if outside is None else outside.reason


def judge_alone(case_json: str, backend: str, device: str) -> list[str]:
    """What is wrong with a backend's answer to a case, a line each."""
    case = decode_case(case_json.encode(), "CASE")
    return [finding_text(finding) for finding in judge_case(case, load_backend(backend, device)).findings]


def call_adapter(
    case_json: str, backend: str, device: str, q: FloatArray, k: FloatArray, v: FloatArray, *gradients: FloatArray
) -> tuple[Numbers, list[str]]:
    """What a backend gives for these inputs, by name, and one line for all else that is wrong with its calls."""
    script = Script(decode_case(case_json.encode(), "CASE"))
    drawn = script.template.values
    dout, dlse = gradients or (drawn.dout, drawn.dlse)
    script.template.values = Values(q, k, v, dout, dlse)
    answers = {answer.call: answer for answer in script.answers(lambda: load_backend(backend, device))}
    numbers: Numbers = {}
    for call in COMPARED:
        if call in answers:
            numbers |= answers[call].numbers
    return numbers, [note for answer in answers.values() for note in notes_on(answer, answers)]


def notes_on(answer: Answer, answers: dict[str, Answer]) -> list[str]:
    """What a call did beside its numbers, and whether a call that changes nothing changed them."""
    if answer.marks[:1] == ("raised",):
        return [f"{answer.call}: the backend raised {answer.marks[1]}"]
    notes = [f"{answer.call}: the backend changed its input {name}" for name in mutated(answer)]
    notes += [f"{answer.call}: bytes {overrun} were overwritten" for overrun in overruns(answer)]
    if len(answer.marks) == 3 and answer.marks[2]:
        notes.append(f"{answer.call}: ran on a fallback")
    if answer.call in REPEATED and not has_same_numbers(answer, answers[REPEATED[answer.call]]):
        notes.append(f"{answer.call}: {NOTES[answer.call]}")
    return notes


def overruns(answer: Answer) -> tuple[str, ...]:
    """Guard bands that a forward call wrote to."""
    names = answer.marks[1] if len(answer.marks) == 3 else ()
    return names if isinstance(names, tuple) else ()


def mutated(answer: Answer) -> tuple[str, ...]:
    """Names of inputs that a call changed."""
    names = answer.marks[0] if answer.marks else ()
    return names if isinstance(names, tuple) else ()


def has_same_numbers(a: Answer, b: Answer) -> bool:
    """Whether two calls gave the same bits."""
    return Answer("", a.numbers).same_bits(Answer("", b.numbers))
