"""The performance half of the gate: ratios, never times; and a time that was not earned is none."""

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from attnconform.conformance.backend import Backend, Capabilities, Forward
from attnconform.conformance.bench import decode, foreign
from attnconform.conformance.bench.decode import draw_of
from attnconform.conformance.bench.decode_work import TINY
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.performance_gate import (
    compare_performance,
    dishonesties,
    performance_gate,
    performance_markdown,
)
from attnconform.conformance.bench.row import Peer
from attnconform.conformance.bench.timing import Ceilings
from attnconform.conformance.command_line import main


def gate(numbers, before, now):
    return compare_performance(numbers.report(before), numbers.report(now))


def test_an_equal_run_opens_it(numbers):
    assert gate(numbers, numbers.row(), numbers.row()).is_open


def test_a_slower_machine_with_the_same_shares_opens_it(numbers):
    slow = numbers.report(numbers.row(ours=numbers.timing(200.0)))
    slow = type(slow)(
        **{f: getattr(slow, f) for f in slow.__struct_fields__ if f != "ceilings"},
        ceilings=Ceilings(copy_bytes_per_second=2e12, matmul_flops_per_second=3.5e14),
    )
    assert compare_performance(numbers.report(numbers.row()), slow).is_open


def test_a_smaller_share_of_the_copy_bandwidth_closes_it(numbers):
    report = gate(numbers, numbers.row(), numbers.row(ours=numbers.timing(130.0)))
    assert report.worse == ["seed64k: w: attention: 50% of the roofline before, 38% now"]


def test_a_worse_ratio_to_the_peer_of_the_same_run_closes_it(numbers):
    faster_peer = Peer(name="flashinfer", timing=numbers.timing(80.0))
    report = gate(
        numbers, numbers.row(peer=Peer(name="flashinfer", timing=numbers.timing(110.0))), numbers.row(peer=faster_peer)
    )
    assert report.worse == ["seed64k: w: attention: 1.10 times as fast as flashinfer before, 0.80 now"]


def test_a_ratio_that_is_no_longer_there_closes_it(numbers):
    before = numbers.row(peer=Peer(name="flashinfer", timing=numbers.timing(110.0)))
    gone = numbers.row(peer=Peer(name="flashinfer", error="not installed"))
    assert gate(numbers, before, gone).worse == [
        "seed64k: w: attention: 1.10 times as fast as flashinfer before, not compared now: not installed"
    ]
    assert "no peer was asked for" in gate(numbers, before, numbers.row()).worse[0]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"workspace_reserved": 2000}, "reserves 2000 bytes, 1000 before"),
        ({"recompiles": 3}, "3 compilations after the warm-up, 0 before"),
        ({"fallbacks": {"fallback dense-rate": 2}}, "falls back for"),
    ],
)
def test_memory_recompiles_and_fallbacks_close_it(numbers, figures, said):
    now = numbers.row(figures=Figures(**({"bytes_ideal": 200_000_000, "workspace_reserved": 1000} | figures)))
    assert said in gate(numbers, numbers.row(), now).worse[0]


def test_a_longer_tail_closes_it(numbers):
    assert (
        "P99 is 5.0 times the median"
        in gate(numbers, numbers.row(), numbers.row(ours=numbers.timing(100.0, p99=500.0))).worse[0]
    )


def test_a_row_that_is_no_longer_measured_closes_it(numbers):
    assert gate(numbers, numbers.row(), numbers.row(work="other")).missing == ["seed64k: w: attention"]


def test_a_baseline_of_another_device_is_refused(numbers):
    with pytest.raises(ValueError, match="device is A100"):
        compare_performance(numbers.report(numbers.row(), device="A100"), numbers.report(numbers.row()))


def test_a_right_answer_in_a_dense_time_is_a_dense_pass(numbers):
    row = numbers.row(ours=numbers.timing(700.0), dense=numbers.timing(800.0))
    assert "a dense pass" in gate(numbers, row, row).dishonest[0]  # though the baseline was no better


def test_a_right_answer_with_the_bytes_of_every_key_is_a_dense_pass(numbers):
    row = numbers.row(figures=Figures(bytes_ideal=200_000_000, bytes_dram=3_200_000_000))
    assert "a dense pass" in gate(numbers, row, row).dishonest[0]


def test_a_time_below_what_its_bytes_allow_is_skipped_keys(numbers):
    row = numbers.row(ours=numbers.timing(30.0))
    assert "keys were skipped" in gate(numbers, row, row).dishonest[0]


@pytest.mark.parametrize("error", [0.05, float("nan")])
def test_a_fast_row_with_a_wrong_answer_closes_it(numbers, error):
    row = numbers.row(error=error, ours=numbers.timing(60.0))
    report = gate(numbers, numbers.row(), row)
    assert "keys were skipped or doubled" in report.dishonest[0]
    assert "fails the gate" in performance_markdown(report, numbers.report(row))


@pytest.mark.parametrize("suite", ["seed64k", "prefill"])
def test_a_prompt_is_held_to_its_dense_time_like_a_decode_batch(numbers, suite):
    row = numbers.row(suite=suite, ours=numbers.timing(700.0), dense=numbers.timing(800.0), rate=0.25)
    assert "25% of the keys take 88% of the time of all of them" in gate(numbers, row, row).dishonest[0]


class Masked(Backend):
    """Right, and secretly dense: every key of the cache under a mask."""

    name = "masked"
    capabilities = Capabilities(has_backward=False)

    def forward(self, problem, tensors):
        return Forward(attend_all(problem, tensors, problem.masks), None, path="sparse")


class SkipsKeys(Backend):
    """Fast, because it leaves out the last page of every list."""

    name = "skips keys"
    capabilities = Capabilities(has_backward=False)

    def forward(self, problem, tensors):
        masks = [mask.clone() for mask in problem.masks]
        for mask in masks:
            for head in mask[:, 0]:
                head[head.nonzero()[-problem.spec.cache.page_size :, 0]] = False
        return Forward(attend_all(problem, tensors, masks), None, path="sparse")


class FallsBack(Masked):
    """For one input set of two, and says so."""

    first = None

    def forward(self, problem, tensors):
        self.first = self.first or tensors.q.data_ptr()
        is_first = tensors.q.data_ptr() == self.first
        forward = super().forward(problem, tensors)
        return Forward(forward.out, None, path="fallback dense-rate" if is_first else "sparse")


def attend_all(problem, tensors, masks):
    spec = problem.spec
    out = torch.empty_like(tensors.q)
    for n, mask in enumerate(masks):
        k, v = (
            problem.gathered(cache, n).repeat_interleave(spec.group_size, dim=1).transpose(0, 1)
            for cache in (tensors.k_cache, tensors.v_cache)
        )
        rows = problem.q_rows(n)
        scores = (tensors.q[rows].transpose(0, 1) @ k.transpose(1, 2)) * spec.sm_scale
        out[rows] = (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(0, 1)
    return out


def foreign_report(numbers, backend, machine):
    """A row as bench -b makes it, timings included, under a GPU's ceilings."""
    row = foreign.foreign_row(backend, draw_of(TINY, machine), machine, seconds=0.1)
    return numbers.report(row, is_interpreted=True)


def test_correct_but_secretly_dense_is_caught_without_a_clock(numbers, machine):
    report = foreign_report(numbers, Masked(), machine)
    assert report.rows[0].error <= 1e-5
    assert "it reads more keys" in compare_performance(report, report).dishonest[0]


def test_fast_because_keys_were_skipped_is_caught_without_a_clock(numbers, machine):
    report = foreign_report(numbers, SkipsKeys(), machine)
    assert "keys were skipped or doubled" in compare_performance(report, report).dishonest[0]


def test_a_fallback_is_counted_and_its_events_stand_apart(numbers, machine):
    row = foreign.foreign_row(FallsBack(), draw_of(TINY, machine), machine, seconds=0.1)
    assert row.figures.fallbacks == {"fallback dense-rate": 1}
    assert {s.group for s in row.slices if s.by == "fallback"} == {"fallback dense-rate", "none"}


DENSE_IN_SECRET = """
import torch
from attnconform.conformance import Backend, Capabilities, Forward

class Dense(Backend):
    name = "dense in secret"
    capabilities = Capabilities(has_backward=False)

    def forward(self, problem, tensors):
        spec, out = problem.spec, torch.empty_like(tensors.q)
        for n, mask in enumerate(problem.masks):
            k, v = (
                problem.gathered(cache, n).repeat_interleave(spec.group_size, dim=1).transpose(0, 1)
                for cache in (tensors.k_cache, tensors.v_cache)
            )
            rows = problem.q_rows(n)
            scores = (tensors.q[rows].transpose(0, 1) @ k.transpose(1, 2)) * spec.sm_scale
            out[rows] = (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v).transpose(0, 1)
        return Forward(out, None, path="sparse")
"""


def test_the_gate_command_catches_a_dense_pass_by_itself(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "shapes", lambda machine: [TINY])
    (tmp_path / "dense_in_secret.py").write_text(DENSE_IN_SECRET)
    monkeypatch.syspath_prepend(tmp_path)
    baseline, out = tmp_path / "b.json", tmp_path / "out"
    arguments = ["gate", "-b", "dense_in_secret:Dense", "--performance", "--baseline", str(baseline), "--out", str(out)]
    for more in (["--write-baseline"], []):
        done = CliRunner().invoke(main, [*arguments, *more])
        assert done.exit_code == 1, done.output
    assert "it reads more keys" in (out / "gate-performance.md").read_text()


def test_a_gate_over_nothing_is_refused(numbers, tmp_path):
    with pytest.raises(ValueError, match="no row was measured"):
        performance_gate(
            Console(quiet=True), baseline=tmp_path / "b.json", run=numbers.report, out=tmp_path, write_baseline=True
        )


def test_the_bundled_kernels_are_neither(numbers, machine):
    from attnconform.conformance.adapters.triton_kernels import TritonKernels

    report = foreign_report(numbers, TritonKernels("cpu"), machine)
    assert compare_performance(report, report).is_open
    assert list(dishonesties(report.rows[0], report)) == []


def test_the_command_writes_a_baseline_then_holds_on_to_it(numbers, tmp_path):
    baseline, console = tmp_path / "baseline.json", Console(quiet=True)

    def run_gate(row, **options):
        return performance_gate(
            console, baseline=baseline, run=lambda: numbers.report(row), out=tmp_path / "out", **options
        )

    assert run_gate(numbers.row(), write_baseline=True) == 0
    assert run_gate(numbers.row()) == 0
    assert run_gate(numbers.row(ours=numbers.timing(150.0))) == 1
    assert run_gate(numbers.row(ours=numbers.timing(150.0)), margin=2.0) == 0
    assert run_gate(numbers.row(ours=numbers.timing(150.0), error=0.5), margin=2.0) == 1
    assert "Not what they seem" in (tmp_path / "out" / "gate-performance.md").read_text()


def test_a_baseline_that_is_wrong_itself_is_said(numbers, tmp_path):
    code = performance_gate(
        Console(quiet=True),
        baseline=tmp_path / "b.json",
        run=lambda: numbers.report(numbers.row(error=0.5)),
        out=tmp_path,
        write_baseline=True,
    )
    assert code == 1
