"""A call that does not repeat is classified by what decides its answer; memory that calls keep is found."""

from dataclasses import replace

import pytest
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.deviations import DEVIATIONS, VARIANTS
from attnconform.conformance.judge.dense_watch import watch_for_dense
from attnconform.conformance.judge.hygiene import check_bounds, check_path, check_repeat, check_written
from attnconform.conformance.judge.interference import check_other_rows, check_unselected
from attnconform.conformance.judge.membership import check_membership
from attnconform.conformance.judge.memory import CONFIRMED, KEPT_BYTES, check_memory
from attnconform.conformance.judge.storage import GUARD_VALUES
from attnconform.conformance.judge.trial import Trial, same_bits
from attnconform.reference import philox

CASE = next(c for c in matrix("L0") if c.structure.mask_rule is not None)
STRIDED = next(
    c for c in matrix("L1") if c.operation == "forward" and c.structure.interleaved and max(c.structure.seqlens_q) > 1
)
SPARSE = next(c for c in matrix("L0") if c.structure.candidates is not None)


class WritesBeside(StepsBackend):
    """Stores `value` at an offset from the first element of an output."""

    def __init__(self, output, offset, value=0.0):
        super().__init__()
        self.output, self.offset, self.value = output, offset, value

    def forward(self, problem, tensors):
        done = super().forward(problem, tensors)
        tensor = getattr(tensors, self.output)
        at = tensor.storage_offset() + (tensor.numel() if self.offset == "end" else self.offset)
        torch.as_strided(tensor, (1,), (1,), at).fill_(self.value)
        return done


@pytest.mark.parametrize("output", ["out", "lse"])
@pytest.mark.parametrize(("offset", "side"), [(-1, "before"), ("end", "past")])
def test_a_write_beside_an_output_is_named_by_output_and_side(output, offset, side):
    (finding,) = check_bounds(Trial(CASE, WritesBeside(output, offset)))
    assert finding.state == "FAIL_oob_write"
    assert finding.message == f"bytes {side} {output} were overwritten"


def test_every_guard_band_has_a_mark_of_its_own():
    assert len(set(GUARD_VALUES.values())) == len(GUARD_VALUES) == 6
    (finding,) = check_bounds(Trial(CASE, WritesBeside("lse", -1, GUARD_VALUES["out", "past"])))
    assert finding.message == "bytes before lse were overwritten"


@pytest.mark.parametrize(
    ("mistake", "clauses"),
    [
        ("writes-out-without-gaps", {"COORD-STRIDE"}),
        ("writes-lse-without-gaps", {"COORD-STRIDE"}),
        ("stores-the-padding-of-a-vector", {"SAFE-BOUNDS"}),
    ],
)
def test_what_lies_between_the_rows_of_an_output_is_watched(mistake, clauses):
    found = check_bounds(Trial(STRIDED, DEVIATIONS[mistake].build()))
    assert {finding.clauses[0] for finding in found} == clauses
    assert all("between rows of" in finding.message for finding in found)


def test_a_strided_output_written_as_a_dense_one_is_told_from_one_left_unwritten():
    (finding,) = check_written(Trial(STRIDED, DEVIATIONS["takes-a-head-of-out-for-its-head-dim"].build()))
    assert finding.clauses == ("COORD-STRIDE", "SAFE-WRITE")
    unwritten = check_written(Trial(STRIDED, DEVIATIONS["leaves-lse-of-odd-heads-unwritten"].build()))
    assert [finding.clauses for finding in unwritten] == [("SAFE-WRITE",)]


class Counts(StepsBackend):
    """Changes one element by what `change` says of the number of the call and of the one before."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.before = 0.0

    def forward(self, problem, tensors):
        self.calls += 1
        done = super().forward(problem, tensors)
        mark = float(tensors.out[-1, -1, -1])
        tensors.out[0, 0, 0] = self.change(self.calls, self.before)
        self.before = mark
        return done


class FirstCallDiffers(Counts):
    def change(self, calls, before):
        return float(calls == 1)


class SeededRace(Counts):
    def change(self, calls, before):
        return float(philox.integers(0x2ACE, calls, (1,), low=0, high=100)[0])


class RareRace(Counts):
    """Another answer in the second call alone: the five repeats that follow all agree with the first."""

    def change(self, calls, before):
        return float(calls == 2)


class KeepsTheCallBefore(Counts):
    def change(self, calls, before):
        return before


class ReadsWhatOutHeld(StepsBackend):
    def forward(self, problem, tensors):
        held = torch.nan_to_num(tensors.out[0, 0, 0].clone())
        done = super().forward(problem, tensors)
        tensors.out[0, 0, 0] = held
        return done


def findings(backend, check=check_repeat, case=CASE):
    return check(Trial(case, backend))


@pytest.mark.parametrize(
    ("backend", "state", "words"),
    [
        (FirstCallDiffers, "FAIL_determinism", "differs by the first call only"),
        (SeededRace, "FAIL_race", "differs from run to run"),
        (RareRace, "FAIL_race", "differs from run to run, rarely"),
        (KeepsTheCallBefore, "FAIL_determinism", "differs with what ran before it"),
        (ReadsWhatOutHeld, "FAIL_unwritten", "changes with what it held before"),
    ],
)
def test_a_difference_is_classified_by_five_repeats(backend, state, words):
    found = findings(backend())
    assert [f.state for f in found] == [state]
    assert words in found[0].message


def test_a_call_that_repeats_is_not_repeated_again():
    trial = Trial(CASE, StepsBackend())
    assert check_repeat(trial) == []
    assert trial.calls == 2


@pytest.mark.parametrize(
    ("deviation", "state", "words"),
    [
        ("loses-a-key-now-and-then", "FAIL_race", "from run to run"),
        ("adds-keys-in-any-order", "FAIL_race", "from run to run"),
        ("keeps-leftover-accumulators", "FAIL_determinism", "with what ran before"),
    ],
)
def test_seeded_races_of_the_deviations_are_classified(deviation, state, words):
    case = next(c for c in matrix("L1") if c.operation == "forward" and "mixed" in c.id)
    found = findings(DEVIATIONS[deviation].build(), case=case)
    assert [f.state for f in found] == [state]
    assert words in found[0].message
    assert found[0].clauses == ("DETERMINISM-RUN",)


class KeepsEveryOutput(StepsBackend):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, problem, tensors):
        self.kept.append(tensors.out.clone())
        return super().forward(problem, tensors)


class KeepsTheLastOutput(StepsBackend):
    """A cache of one entry, which is filled once and replaced."""

    def forward(self, problem, tensors):
        self.kept = tensors.out.clone()
        return super().forward(problem, tensors)


class FillsACache(KeepsEveryOutput):
    """A cache of a dozen entries, as an interpreter's own may be: it grows for some calls and then no more."""

    def forward(self, problem, tensors):
        done = super().forward(problem, tensors)
        self.kept = self.kept[:12]
        return done


def test_memory_that_every_call_keeps_is_found():
    found = findings(KeepsEveryOutput(), check_memory)
    assert [f.state for f in found] == ["FAIL_leak"]
    assert f"each of {CONFIRMED} equal calls keeps memory" in found[0].message


@pytest.mark.parametrize("backend", [StepsBackend, KeepsTheLastOutput, FillsACache])
def test_a_cache_that_is_full_after_some_calls_is_no_leak(backend):
    assert findings(backend(), check_memory) == []


class FallsBackAtTheSecondCall(Counts):
    def forward(self, problem, tensors):
        done = super().forward(problem, tensors)
        return replace(done, path="fallback: dense") if self.calls == 2 else done

    def change(self, calls, before):
        return 0.0


def test_a_fallback_of_any_call_is_one_of_the_case():
    trial = Trial(CASE, FallsBackAtTheSecondCall())
    assert check_written(trial) == []
    assert [f.state for f in check_path(trial)] == ["FALLBACK_UNDECLARED"]


class AddsUp(StepsBackend):
    """Its output takes in what lies in slots that no row attends."""

    def forward(self, problem, tensors):
        done = super().forward(problem, tensors)
        tensors.out[0, 0, 0] += torch.nan_to_num(tensors.v_cache.float(), nan=1.0, posinf=0.0, neginf=0.0).sum()
        return done


def test_what_no_row_attends_is_told_from_what_nobody_owns():
    trial = Trial(SPARSE, AddsUp())
    assert not trial.selected.all()
    assert trial.second is not None
    assert {f.state for f in (*check_repeat(trial), *check_unselected(trial))} == {"FAIL_interference"}


def test_probes_for_membership_screen_memory():
    trial = Trial(CASE, StepsBackend())
    check_membership(trial)
    calls = trial.calls
    assert trial.growth
    assert min(trial.growth) < KEPT_BYTES
    assert check_memory(trial) == []
    assert trial.calls == calls
    leaking = Trial(CASE, KeepsEveryOutput())
    check_membership(leaking)
    assert [f.state for f in check_memory(leaking)] == ["FAIL_leak"]


class AttendsDensely(StepsBackend):
    def forward(self, problem, tensors):
        for n in range(problem.spec.batch_size):
            q = tensors.q[problem.q_rows(n)].transpose(0, 1).float()
            k = problem.gathered(tensors.k_cache, n).transpose(0, 1).float()
            k = k.repeat_interleave(problem.spec.group_size, 0)
            torch.nn.functional.scaled_dot_product_attention(q[None], k[None], k[None])
        return super().forward(problem, tensors)


def test_torch_attention_over_every_key_is_seen_where_candidates_are_few():
    assert watch_for_dense(Trial(SPARSE, AttendsDensely())) is not None
    assert watch_for_dense(Trial(SPARSE, StepsBackend())) is None


def test_a_dense_problem_has_no_dense_fallback():
    assert watch_for_dense(Trial(CASE, AttendsDensely())) is None


EMPTY = next(
    c for c in matrix("L1") if c.operation == "forward" and c.axes["empty"] == "middle" and c.values == "normal"
)


class SignsTheZerosIn(StepsBackend):
    """The zeros of an empty row have the signs of sums of all values; out is stored in a dtype of its own."""

    steps = VARIANTS["signs-the-zeros-of-an-empty-row"].build().steps

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, problem, tensors):
        done = super().forward(problem, tensors)
        return replace(done, out=done.out.to(self.dtype))


OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_signs_of_an_empty_rows_zeros_are_free(dtype):
    trial = Trial(EMPTY, SignsTheZerosIn(dtype))
    for check in (check_repeat, check_unselected, check_other_rows):
        assert check(trial) == []
    out = trial.base.forward.out[torch.from_numpy(trial.is_empty)]
    assert out.dtype == dtype
    signs = torch.signbit(out.float())
    assert signs.any()
    assert not signs.all()


@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_no_other_sign_and_no_nan_is_settled(dtype):
    trial = Trial(EMPTY, StepsBackend())
    is_empty = torch.from_numpy(trial.is_empty)
    assert is_empty.any()
    assert not is_empty.all()
    zeros = torch.full((*is_empty.shape, 4), -0.0).to(dtype)
    settled = trial.settled_out(zeros)
    assert settled.dtype == dtype
    assert torch.equal(torch.signbit(settled.float()), ~is_empty[..., None].expand_as(zeros))
    assert torch.signbit(zeros.float()).all()
    assert trial.settled_out(torch.full(zeros.shape, torch.nan).to(dtype)).float().isnan().all()
    small = torch.full(zeros.shape, -(2.0**-9)).to(dtype)  # the smallest number of float8_e4m3fn
    assert small.float().all()
    assert torch.equal(trial.settled_out(small).float(), small.float())


@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_a_sign_of_zero_a_number_and_a_dtype_make_other_bits(dtype):
    numbers = torch.tensor([0.0, -0.0, 1.0, torch.nan]).to(dtype)
    assert same_bits(numbers, numbers.clone())
    for at, other in ((0, -0.0), (1, 0.0), (2, -1.0), (2, torch.nan), (3, 1.0)):
        changed = numbers.clone()
        changed[at] = torch.tensor(other).to(dtype)
        assert not same_bits(numbers, changed)
    assert not same_bits(numbers, numbers.double())


def test_codes_that_say_nan_by_other_bits_are_the_same():
    a, b = (torch.tensor([code], dtype=torch.uint8).view(torch.float8_e5m2) for code in (0x7D, 0x7F))
    assert a.float().isnan().all()
    assert b.float().isnan().all()
    assert same_bits(a, b)
