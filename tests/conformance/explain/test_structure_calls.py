"""What is kept of the structures that a backend builds."""

import numpy as np

from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.explain.structure_calls import plain, record_structures
from attnconform.conformance.judge.plan_structures import drawn_layers


def log_of(backend, ask):
    """What is recorded while a backend is asked."""
    log = record_structures(backend)
    ask(backend)
    return log


def ask_pool(backend):
    pool = backend.page_pool(4, 2, 3)
    parent = pool.allocate()
    pool.append(parent, 3)
    pool.page_table(pool.fork(parent, 3))


def ask_plans(backend):
    backend.plan_each(drawn_layers(Draw(3)), 3, 12)


def test_sets_are_told_by_what_is_in_them():
    assert plain(frozenset({"b", "a"})) == plain({"a", "b"}) == ("a", "b")
    assert plain(frozenset({"a"})) != plain(frozenset())


def test_a_pool_is_told_by_its_answers():
    right = log_of(ReferenceStructures(), ask_pool)
    wrong = log_of(DEVIATIONS["forks-into-pages-of-its-own"].build(), ask_pool)
    assert [entry[0] for entry in right] == ["page_pool", "allocate", "append", "fork", "page_table"]
    assert right[:4] == wrong[:4]
    assert right[4] != wrong[4]


def test_of_keys_only_which_are_equal_is_told():
    class Keys(ReferenceStructures):
        def plan_key(self, call):
            return f"key of {call}"

    def ask(backend):
        for call in ("a", "b", "a"):
            backend.plan_key(call)

    assert [entry[1] for entry in log_of(Keys(), ask)] == [0, 1, 0]


def test_of_addresses_only_which_are_equal_is_told():
    deviation = DEVIATIONS["allocates-for-every-plan"]
    first, again = log_of(deviation.build(), ask_plans), log_of(deviation.build(), ask_plans)
    assert first == again
    assert first != log_of(ReferenceStructures(), ask_plans)


def test_an_error_is_an_answer():
    class Raises(ReferenceStructures):
        def choose_tier(self, length, tiers):
            raise KeyError(length)

    def ask(backend):
        try:
            backend.choose_tier(1, [2])
        except KeyError:
            return

    assert log_of(Raises(), ask) == [("choose_tier", "raised", "KeyError")]


def test_inputs_that_change_are_told():
    class Sorts(ReferenceStructures):
        def decode_csr(self, indptr, indices):
            indices.sort()
            return []

    entry = log_of(Sorts(), lambda backend: backend.decode_csr(np.array([0, 2]), np.array([3, 1])))[0]
    assert entry == ("decode_csr", (), False)
