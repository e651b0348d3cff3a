"""What the hardware profiler runs has a name for every suite that is counted."""

from types import SimpleNamespace

import pytest

from attnconform.conformance.bench.command import counted_works
from attnconform.conformance.bench.probe import FINDERS, find_work
from attnconform.conformance.bench.seeded.subjects import SUBJECTS

REAL = SimpleNamespace(is_real=True)


def test_every_counted_work_has_a_name_that_the_probe_knows():
    names = counted_works(("seed64k", "prefill", "nsa", "sweep"), REAL).values()
    assert len(names) == 6 + 5 + 2
    assert {name.split(":")[0] for name in names} | {"diagnose"} == FINDERS.keys()
    assert SUBJECTS.keys() == {"healthy", "gather", "long-row", "tier"}


def test_a_name_that_the_probe_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"work is 'quant:0', but must start with one of seed64k, prefill, nsa"):
        find_work("quant:0")


@pytest.mark.parametrize("name", ["seed64k:0", "prefill:1", "nsa:1", "diagnose:healthy"])
def test_a_name_becomes_a_call_that_runs(name, machine):
    suite, _, which = name.partition(":")
    FINDERS[suite](which, machine)()
