"""Smoke names the convention on which an adapter differs, one or two of them, or the case that no combination fits."""

from itertools import combinations as pairs
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attnconform.conformance.adapters.conventions import CONTRACT, CONVENTIONS, attend, combinations
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Capabilities, Forward, OneOf
from attnconform.conformance.explain.smoke import diagnose, lines_of
from attnconform.conformance.explain.smoke_cases import EVERYWHERE, Sizes, sizes_of, tiny_cases
from attnconform.conformance.judge.trial import Trial

ODD = [(axis, value) for axis, convention in CONVENTIONS.items() for value in convention.values[1:]]
PAIRS = [(a, b) for a, b in pairs(ODD, 2) if a[0] != b[0]]


def following(changes, **declared):
    """A backend class that follows the contract but for some conventions."""

    class Follows(StepsBackend):
        capabilities = Capabilities(**declared)

        def forward(self, problem, tensors):
            q, k, v = self.inputs(problem, tensors)
            out, lse = attend({**CONTRACT, **changes}, problem.spec, SimpleNamespace(q=q, k=k, v=v))
            tensors.out.copy_(torch.from_numpy(out))
            tensors.lse.copy_(torch.from_numpy(lse))
            return Forward(tensors.out, tensors.lse)

    return Follows


def test_a_right_backend_follows_the_contract_on_every_axis():
    diagnosis = diagnose(StepsBackend)
    assert diagnosis.conforms
    assert diagnosis.fitting == (CONTRACT,)
    assert lines_of(diagnosis) == [f"conventions: the contract's, on {len(CONVENTIONS)} axes"]


@pytest.mark.parametrize(("axis", "value"), ODD)
def test_each_odd_convention_is_named_alone_with_its_clause(axis, value):
    diagnosis = diagnose(following({axis: value}))
    assert diagnosis.fitting == ({**CONTRACT, axis: value},)
    assert diagnosis.broken == (axis,)
    assert not diagnosis.conforms
    told = " ".join(lines_of(diagnosis))
    assert repr(value) in told
    assert f"[{CONVENTIONS[axis].clause}]" in told


@pytest.mark.parametrize(("first", "second"), PAIRS[:: max(len(PAIRS) // 24, 1)])
def test_two_odd_conventions_together_are_both_named(first, second):
    diagnosis = diagnose(following(dict([first, second])))
    assert diagnosis.fitting == ({**CONTRACT, **dict([first, second])},)
    assert set(diagnosis.broken) == {first[0], second[0]}


def test_what_no_convention_explains_is_told_with_the_case_and_its_clause():
    class StretchesListedRows(StepsBackend):
        def forward(self, problem, tensors):
            done = super().forward(problem, tensors)
            if problem.spec.candidates is not None:
                tensors.out.mul_(1.25)
            return done

    diagnosis = diagnose(StretchesListedRows)
    assert not diagnosis.fitting
    assert diagnosis.misfits
    told = lines_of(diagnosis)[-1]
    assert "no combination fits" in told
    assert any(name in told for name in ("listed", "listed-twice", "hole-inside", "no-key"))
    assert "SET-IDENTITY" in told


def test_an_axis_without_a_case_that_runs_is_said_to_be_untried():
    diagnosis = diagnose(following({}, supported={"score": OneOf(("none",)), "granularity": OneOf(("dense",))}))
    assert diagnosis.conforms
    assert {"ALiBi", "soft cap", "duplicates", "holes", "lse of an empty row"}.isdisjoint(diagnosis.told)
    assert any("not tried" in line and "ALiBi" in line for line in lines_of(diagnosis))


def test_a_backend_that_runs_nothing_is_told_apart_from_one_that_conforms():
    diagnosis = diagnose(following({}, supported={"phase": OneOf(())}))
    assert not diagnosis.conforms
    assert lines_of(diagnosis)[-1] == "no case ran"


def test_a_case_that_raises_is_said_and_the_others_still_tell():
    class RefusesLists(StepsBackend):
        def forward(self, problem, tensors):
            if problem.spec.candidates is not None:
                raise RuntimeError("lists are not built yet")
            return super().forward(problem, tensors)

    diagnosis = diagnose(RefusesLists)
    assert len(diagnosis.not_run) == 4
    assert any("lists are not built yet" in line for line in lines_of(diagnosis))
    assert "causal alignment" in diagnosis.told


def test_a_case_depends_on_no_axis_but_its_own():
    for tiny in tiny_cases(Sizes()):
        trial = Trial(tiny.case, StepsBackend())
        others = tuple(axis for axis in CONVENTIONS if axis not in tiny.axes)
        want = attend(CONTRACT, trial.problem, trial.values)
        changed = combinations(others)
        for combination in changed[:: max(len(changed) // 12, 1)]:
            for got, right in zip(attend(combination, trial.problem, trial.values), want, strict=True):
                np.testing.assert_array_equal(got, right, err_msg=f"{tiny.case.id} {combination}")


def test_every_axis_is_told_by_some_case_and_every_case_by_its_axes():
    told = {axis for tiny in tiny_cases(Sizes()) for axis in tiny.axes}
    assert told == set(CONVENTIONS)
    for tiny in tiny_cases(Sizes()):
        trial = Trial(tiny.case, StepsBackend())
        answers = [attend(c, trial.problem, trial.values) for c in combinations(tiny.axes[len(EVERYWHERE) :])]
        for i, (out, lse) in enumerate(answers):
            for other_out, other_lse in answers[:i]:
                same = np.array_equal(out, other_out) and np.array_equal(lse, other_lse)
                assert not same or "soft cap" in tiny.axes  # one of its values is the order given


def test_numbers_of_half_precision_are_told_within_their_bounds():
    diagnosis = diagnose(
        following({"window": CONVENTIONS["window"].values[1]}, supported={"dtype": OneOf(("bfloat16",))})
    )
    assert diagnosis.broken == ("window",)


SERVING = {
    "dtype": OneOf(("bfloat16",)), "heads": OneOf(("32/8",)), "head_dim": OneOf(("576/512",)),
    "page_size": OneOf(("64",)), "layout": OneOf(("HND",)), "sharing": OneOf(("kv_head",)),
}  # fmt: skip


def test_cases_have_the_sizes_of_a_declaration_and_the_usual_ones_where_they_are_declared():
    sizes = sizes_of(Capabilities(supported=SERVING))
    assert sizes == Sizes("bfloat16", "576/512", "64", "HND", "kv_head", "32/8", "32/8", "4/1")
    assert sizes_of(Capabilities()) == Sizes()
    assert sizes_of(Capabilities(supported={"heads": OneOf(("6/2", "8/1", "3/3"))})).heads == "3/3"


@pytest.mark.parametrize("axis", [*CONVENTIONS])
def test_a_backend_of_sizes_of_its_own_is_told_as_well(axis):
    value = CONVENTIONS[axis].values[1]
    small = SERVING | {"head_dim": OneOf(("32/16",)), "heads": OneOf(("8/4",))}
    diagnosis = diagnose(following({axis: value}, supported=small))
    assert diagnosis.fitting == ({**CONTRACT, axis: value},)
    assert len(diagnosis.not_run) == 1  # heads of one group
