"""A page pool held to plain lists of tokens, through every order of events that Hypothesis finds."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from attnconform.conformance.cases import profiles
from attnconform.reference.errors import RefusedInput
from attnconform.reference.page_pool import Handle, PageCopy, PagePool

profiles.load_profile()

NUM_PAGES, NUM_ROWS = 7, 3


class PoolMachine(RuleBasedStateMachine):
    """Requests as lists of tokens; the pool's tables must lead to the same ones in a memory that is written in turn."""

    handles, ended = Bundle("handles"), Bundle("ended")

    @initialize(page_size=st.integers(1, 4))
    def start(self, page_size: int) -> None:
        self.pool = PagePool(num_pages=NUM_PAGES, page_size=page_size, num_rows=NUM_ROWS)
        self.memory = np.full((NUM_PAGES, page_size), -1)
        self.tokens: dict[Handle, list[int]] = {}
        self.names = iter(range(10**6))

    def readers_of(self, page: int) -> int:
        return sum(page in self.pool.page_table(handle) for handle in self.tokens)

    @rule(target=handles)
    def allocate(self):  # type: ignore[no-untyped-def]
        if len(self.tokens) == NUM_ROWS:
            with pytest.raises(RefusedInput, match=r"\[PLAN-CAPACITY\]"):
                self.pool.allocate()
            return multiple()
        handle = self.pool.allocate()
        assert handle not in self.tokens
        self.tokens[handle] = []
        return handle

    @rule(handle=handles, count=st.integers(0, 9))
    def append(self, handle: Handle, count: int) -> None:
        table, length = self.pool.page_table(handle), len(self.tokens[handle])
        used = length % self.pool.page_size
        is_shared = bool(count and used and self.readers_of(int(table[-1])) > 1)
        needed = -(-(length + count) // self.pool.page_size) - len(table) + is_shared
        if needed > self.num_free():
            with pytest.raises(RefusedInput, match=r"\[PLAN-CAPACITY\]"):
                self.pool.append(handle, count)
            assert self.pool.page_table(handle).tolist() == table.tolist()
            return
        copies = self.pool.append(handle, count)
        assert len(copies) == is_shared
        for source, target, num_tokens in copies:
            assert (source, num_tokens) == (table[-1], used)
            self.memory[target, :num_tokens] = self.memory[source, :num_tokens]
        self.write(handle, count)

    def write(self, handle: Handle, count: int) -> None:
        table = self.pool.page_table(handle)
        for position in range(len(self.tokens[handle]), len(self.tokens[handle]) + count):
            page, offset = divmod(position, self.pool.page_size)
            assert self.readers_of(int(table[page])) == 1
            name = next(self.names)
            self.memory[table[page], offset] = name
            self.tokens[handle].append(name)

    @rule(target=handles, handle=handles, part=st.integers(0, 12))
    def fork(self, handle: Handle, part: int):  # type: ignore[no-untyped-def]
        prefix = min(part, len(self.tokens[handle]))
        if len(self.tokens) == NUM_ROWS:
            with pytest.raises(RefusedInput, match=r"\[PLAN-CAPACITY\]"):
                self.pool.fork(handle, prefix)
            return multiple()
        child = self.pool.fork(handle, prefix)
        shared = -(-prefix // self.pool.page_size)
        assert self.pool.page_table(child).tolist() == self.pool.page_table(handle)[:shared].tolist()
        self.tokens[child] = self.tokens[handle][:prefix]
        return child

    @rule(handle=handles, part=st.integers(0, 12))
    def truncate(self, handle: Handle, part: int) -> None:
        kept = min(part, len(self.tokens[handle]))
        self.pool.truncate(handle, kept)
        del self.tokens[handle][kept:]

    @rule(target=ended, handle=consumes(handles))
    def free(self, handle: Handle) -> Handle:
        self.pool.free(handle)
        del self.tokens[handle]
        return handle

    @rule(handle=ended)
    def use_an_ended_handle(self, handle: Handle) -> None:
        for use in (self.pool.page_table, self.pool.seqlen_kv, self.pool.free):
            with pytest.raises(RefusedInput, match=r"\[COORD-GENERATION\]"):
                use(handle)
        with pytest.raises(RefusedInput, match=r"\[COORD-GENERATION\]"):
            self.pool.append(handle, 1)

    def num_free(self) -> int:
        return NUM_PAGES - len({page for handle in self.tokens for page in self.pool.page_table(handle).tolist()})

    @invariant()
    def everybody_reads_their_own_tokens(self) -> None:
        for handle, tokens in self.tokens.items():
            table = self.pool.page_table(handle)
            assert self.pool.seqlen_kv(handle) == len(tokens)
            assert len(table) == -(-len(tokens) // self.pool.page_size)
            assert self.memory[table].ravel()[: len(tokens)].tolist() == tokens

    @invariant()
    def a_page_is_free_exactly_where_nobody_reads_it(self) -> None:
        assert self.pool.num_free == self.num_free()
        assert self.pool.readers.tolist() == [self.readers_of(page) for page in range(NUM_PAGES)]


PoolMachine.TestCase.settings = settings(max_examples=profiles.examples(60), stateful_step_count=40, deadline=None)
TestPagePool = PoolMachine.TestCase


def pool_with(num_tokens: int) -> tuple[PagePool, Handle]:
    pool = PagePool(num_pages=4, page_size=4, num_rows=2)
    handle = pool.allocate()
    pool.append(handle, num_tokens)
    return pool, handle


def test_the_parent_copies_as_much_as_the_child() -> None:
    pool, parent = pool_with(6)
    child = pool.fork(parent, 5)
    assert pool.append(parent, 1) == (PageCopy(source=1, target=2, num_tokens=2),)
    assert pool.append(child, 1) == ()  # the last reader writes in place


def test_a_full_last_page_is_shared_and_never_copied() -> None:
    pool, parent = pool_with(8)
    child = pool.fork(parent, 8)
    assert pool.append(child, 1) == ()
    assert pool.page_table(child).tolist() == [0, 1, 2]


def test_an_append_that_does_not_fit_changes_nothing() -> None:
    pool, handle = pool_with(14)
    child = pool.fork(handle, 14)
    with pytest.raises(RefusedInput, match=r"num_pages is 1, but only 0 pages are free \[PLAN-CAPACITY\]"):
        pool.append(child, 1)  # a page of its own for the shared one
    assert pool.readers.tolist() == [2, 2, 2, 2]
    assert pool.seqlen_kv(child) == 14


def test_prefixes_longer_than_the_request_and_empty_pools_are_refused() -> None:
    pool, handle = pool_with(3)
    for use, clause in ((pool.fork, "COORD-FORK"), (pool.truncate, "COORD-FREE")):
        with pytest.raises(RefusedInput, match=rf"num_tokens is 4.*\[{clause}\]"):
            use(handle, 4)
    with pytest.raises(RefusedInput, match=r"num_tokens is -1"):
        pool.append(handle, -1)
    with pytest.raises(RefusedInput, match=r"row is 5.*\[COORD-GENERATION\]"):
        pool.seqlen_kv(Handle(5, 0))
    with pytest.raises(RefusedInput, match=r"page_size is 0"):
        PagePool(num_pages=1, page_size=0, num_rows=1)
