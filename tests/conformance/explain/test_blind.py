"""Explain, tried blind on deviations of every kind, and what counts as found."""

from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner

from attnconform.conformance.command_line import main
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.explain import blind
from attnconform.conformance.explain.blind import BlindRecord, BlindReport, anonymous, place_of, run_blind, shuffled
from attnconform.conformance.explain.blind_command import joinable, select_deviations
from attnconform.conformance.explain.evidence import Script
from attnconform.conformance.explain.rank import Match, rank_deviations

KINDS = [
    "counts-a-duplicate-twice",  # an edge
    "scales-twice",  # a score
    "returns-lse-in-base-two",  # lse alone
    "divides-by-the-group-size",  # a gradient
    "keeps-leftover-accumulators",  # the second call
    "scales-q-in-place",  # an input that changes
    "writes-past-out",  # a guard
    "falls-back-undeclared",  # the path
    "reads-a-stale-copy-of-the-cache",  # other numbers after the first
    "takes-every-negative-for-a-hole",  # a refusal that does not come
    "raises-whatever-comes-up",  # an error of the wrong type
    "aligns-queries-to-the-longest-request",  # another batch, which one check alone asks about
    "attends-what-any-row-of-the-tile-lists",  # another way to say the problem
    "finds-results-by-address",  # a plan and its runs
    "allocates-in-run",  # what a call asks memory for
    "keeps-every-output",  # what a call leaves behind
    "pads-with-zero",  # a structure
    "keys-without-the-features",  # a key that nobody can read
    "allocates-for-every-plan",  # an address
    "forks-into-pages-of-its-own",  # a pool
]


@pytest.fixture(scope="module")
def report():
    return run_blind([DEVIATIONS[name] for name in KINDS])


def test_a_deviation_of_every_kind_is_found(report):
    missed = [(r.id, r.error, r.rank, r.named_first) for r in report.records if not r.is_found]
    assert not missed
    assert report.share_found == 1.0


def test_a_record_says_what_was_seen(report):
    record = next(r for r in report.records if r.id == "scales-twice")
    assert record.rank == 1
    assert record.clause == "SCORE-SCALE"
    assert record.case_id.startswith("L")
    assert "shrunk" in record.minimal_case_id
    assert record.seconds > 0


def test_roundings_of_another_implementation_do_not_hide_a_deviation():
    names = ["scales-twice", "sees-one-key-of-the-future", "returns-lse-in-base-two"]
    noisy = run_blind([DEVIATIONS[name] for name in names], rounding=True)
    assert [r.is_found for r in noisy.records] == [True] * 3


def test_subjects_and_candidates_give_nothing_away():
    deviation = DEVIATIONS["scales-twice"]
    assert anonymous(deviation, 7, False).name == "subject-007"
    assert deviation.build().name == "scales-twice"
    ids = [d.id for d in shuffled(list(DEVIATIONS.values()), 0)]
    assert sorted(ids) == sorted(DEVIATIONS)
    assert ids != list(DEVIATIONS)
    assert ids != [d.id for d in shuffled(list(DEVIATIONS.values()), 1)]


def test_a_deviation_behind_another_is_not_found():
    right, wrong = DEVIATIONS["scales-twice"], DEVIATIONS["forgets-the-scale"]
    ahead = Match(wrong, 0.0, 6, True, True)
    behind = Match(right, 1.5, 6, False, True)
    assert place_of(right, [ahead, behind])["is_found"] is False
    assert place_of(right, [ahead, behind])["rank"] == 2
    tied = Match(right, 0.0, 6, True, True)
    assert place_of(right, [ahead, tied])["is_found"] is True
    assert place_of(right, [ahead, tied])["ties"] == ("forgets-the-scale",)
    assert place_of(right, [ahead])["error"] == "not ranked"
    assert place_of(right, [Match(right, 9.0, 0, False, False)])["is_found"] is False


def test_a_deviation_that_leaves_a_case_right_is_not_ranked(small_case):
    matches = rank_deviations(small_case(), DEVIATIONS["scales-twice"].build)
    ranked = {match.deviation.id for match in matches}
    assert matches[0].deviation.id == "scales-twice"
    assert "counts-a-duplicate-twice" not in ranked  # the case has no lists
    assert "forgets-the-scale" in ranked


def test_answers_of_one_backend_are_the_same_each_time(small_case):
    script = Script(small_case(operation="backward", q=(2,), kv=(9,)))
    make = DEVIATIONS["loses-an-update-now-and-then"].build
    first, second = list(script.answers(make)), list(script.answers(make))
    assert all(a.same_bits(b) for a, b in zip(first, second, strict=True))
    assert not first[1].same_bits(renamed(first[2]))  # the same call of one backend, repeated


def renamed(answer):
    """An answer under the first one's name."""
    return SimpleNamespace(marks=answer.marks, numbers=answer.numbers)


@pytest.fixture(scope="module")
def first_slice(tmp_path_factory):
    """The command, asked about one deviation, and the report that it wrote."""
    path = tmp_path_factory.mktemp("blind") / "one.json"
    done = CliRunner().invoke(main, ["explain", "--blind", "--select", "scales-twice", "--json", str(path)])
    assert done.exit_code == 0, done.output
    return done.output, path


def test_the_command_writes_a_record_a_deviation(first_slice):
    output, path = first_slice
    assert "explain, tried blind" in output
    written = msgspec.json.decode(path.read_bytes(), type=BlindReport)
    assert [record.id for record in written.records] == ["scales-twice"]
    assert written.records[0].is_found


def test_slices_are_joined_and_not_tried_again(first_slice, tmp_path, monkeypatch):
    known = msgspec.json.decode(first_slice[1].read_bytes(), type=BlindReport).records
    other = DEVIATIONS["forgets-the-scale"]
    tried = []

    def note(deviation, *_):
        tried.append(deviation.id)
        return BlindRecord(id=deviation.id, clause=deviation.clause, fault_class="A", is_structural=False)

    monkeypatch.setattr(blind, "examine", note)
    joined = run_blind([DEVIATIONS["scales-twice"], other], known=known)
    assert tried == [other.id]
    assert {record.id for record in joined.records} == {"scales-twice", other.id}
    assert joined.share_found == 0.5


def test_shards_have_every_deviation_once():
    shards = [{d.id for d in select_deviations("", f"{i}/5")} for i in range(1, 6)]
    assert sum(len(shard) for shard in shards) == len(DEVIATIONS)
    assert set().union(*shards) == set(DEVIATIONS)


def test_a_report_of_another_seed_is_not_joined(first_slice):
    with pytest.raises(ValueError, match="has seed 0, but 3 is asked for"):
        joinable(first_slice[1], seed=3, rounding=False)
    with pytest.raises(ValueError, match="has rounding False, but True is asked for"):
        joinable(first_slice[1], seed=0, rounding=True)


def test_what_is_no_report_is_not_joined(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="is no report of a blind trial"):
        joinable(tmp_path / "x.json", seed=0, rounding=False)


@pytest.mark.parametrize(
    "arguments", [[], ["L0.x", "--blind"], ["--blind", "--select", "no-such-deviation"], ["--blind", "--shard", "3/2"]]
)
def test_the_command_refuses_what_it_cannot_do(arguments):
    done = CliRunner().invoke(main, ["explain", *arguments])
    assert done.exit_code == 2
