"""A backend through a random life of a cache: tokens come and go, pages move, prefixes fork, places are used again.

Hypothesis draws what happens; after each run or replay the answer is compared with the oracle's, and a failure is
shrunk to the shortest life that shows it. [PLAN-REPLAN, PLAN-REPLAY, PLAN-INPUTS, COORD-FORK, COORD-COPY-ON-WRITE,
COORD-GENERATION, COORD-RENUMBER]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.structure import CandidateStructure, Case, Dtype, Structure, build_problem
from attnconform.conformance.cases.values import Values
from attnconform.conformance.judge.lifecycle import Session, observed_again, off, other_problems, stored, write_over
from attnconform.conformance.judge.trial import Observed, Trial
from attnconform.conformance.lifecycle import offers_steps
from attnconform.reference import philox
from attnconform.reference.page_pool import Handle, PageCopy, PagePool
from attnconform.reference.rules import Causal

PAGE_SIZE, NUM_PAGES, NUM_PLACES = 4, 10, 3
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 1, 16
MAX_APPENDED = 6
TOKEN_STREAM, QUERY_STREAM, CHOICE_STREAM = range(111, 114)
PICKS = st.integers(0, 2**16)  # which of the live requests, or of the pages, modulo how many there are


@dataclass
class InUse:
    """The plan in use, if the backend makes any, and the tensors of its last run."""

    handle: Any
    first: Trial  # the problem that the plan was first made for, and so its capacity
    seen: Observed
    launch: Any  # captured on these tensors; None where the backend captures none that outlives its problem

    def replay(self, session: Session) -> Observed:
        """The captured launch, or a call without one, on the very tensors as they are now."""
        if self.launch is None:
            return session.run_on(session.trial, self.handle, self.seen)
        return observed_again(self.seen, session.trial.call(self.launch.replay), session.trial)


class Life(RuleBasedStateMachine):
    """A pool of pages, the requests in it, and a backend that plans and runs over them."""

    make_backend: ClassVar[Callable[[], Backend]]
    dtype: ClassVar[Dtype] = "float32"

    def __init__(self) -> None:
        super().__init__()
        self.backend = type(self).make_backend()
        self.pool = PagePool(num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_rows=NUM_PLACES)
        self.live: list[Handle] = []
        # small integers, which every dtype holds
        self.k, self.v = (np.zeros((NUM_PAGES * PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)) for _ in range(2))
        self.drawn = 0
        self.used: InUse | None = None

    # -- what happens to requests ----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < NUM_PLACES and self.pool.num_free > 0)
    @rule(count=st.integers(1, MAX_APPENDED))
    def begin(self, count: int) -> None:
        """A new request, perhaps in a place that another one had."""
        self.live.append(self.pool.allocate())
        self.write_tokens(self.live[-1], min(count, self.room(self.live[-1])))

    @precondition(lambda self: self.live)
    @rule(pick=PICKS, count=st.integers(1, MAX_APPENDED))
    def append(self, pick: int, count: int) -> None:
        """Tokens at a request's end, as far as there is room."""
        handle = self.picked(pick)
        self.write_tokens(handle, min(count, self.room(handle)))

    @precondition(lambda self: self.live and len(self.live) < NUM_PLACES)
    @rule(pick=PICKS, part=st.integers(1, 4))
    def fork(self, pick: int, part: int) -> None:
        """A request that begins with the first quarters of another one."""
        handle = self.picked(pick)
        self.live.append(self.pool.fork(handle, max(self.pool.seqlen_kv(handle) * part // 4, 1)))

    @precondition(lambda self: self.live)
    @rule(pick=PICKS)
    def evict(self, pick: int) -> None:
        """A request loses its later half."""
        handle = self.picked(pick)
        self.pool.truncate(handle, -(-self.pool.seqlen_kv(handle) // 2))

    @precondition(lambda self: self.live)
    @rule(pick=PICKS)
    def end(self, pick: int) -> None:
        """A request ends, and its place and pages are free."""
        handle = self.picked(pick)
        self.live.remove(handle)
        self.pool.free(handle)

    @precondition(lambda self: self.live and self.pool.num_free > 0)
    @rule(pick=PICKS, place=PICKS)
    def move(self, pick: int, place: int) -> None:
        """A page goes elsewhere in the pool, with all tables that name it; what was there stays behind."""
        used, free = np.flatnonzero(self.pool.readers), np.flatnonzero(self.pool.readers == 0)
        move_page(self.pool, int(used[pick % len(used)]), int(free[place % len(free)]), (self.k, self.v))

    # -- planning and running --------------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(lists=st.booleans(), seed=PICKS)
    def plan_and_run(self, lists: bool, seed: int) -> None:
        """Plans again for the requests as they are, in the plan in use where it has room, and runs."""
        trial = self.trial(lists=lists, seed=seed)
        session = Session(trial)
        if self.used is not None and fits(trial, self.used.first):
            handle, first = session.plan_again(self.used.handle, trial), self.used.first
        else:
            handle, first = session.plan(trial), trial
        for _ in range(2):  # the second run finds the workspace that the first one left
            seen = session.run(trial, handle)
            self.expect_right(trial, seen)
        handle, launch = captured(session, handle, seen)
        self.used = InUse(handle, first, seen, launch)

    @precondition(lambda self: self.used is not None and len(self.live) == self.used.first.problem.batch_size)
    @rule(seed=PICKS)
    def replay(self, seed: int) -> None:
        """The requests as they are by now, written over the tensors of the last run, and its launch once more."""
        used = self.used
        assert used is not None
        trial = self.trial(lists=used.first.problem.candidates is not None, seed=seed)
        if not fits(trial, used.first):
            return
        session = Session(trial)
        used.handle = session.plan_again(used.handle, trial)
        write_over(used.seen.tensors, stored(trial, trial.values, trial.owned))
        self.expect_right(trial, used.replay(session))

    @invariant()
    def every_page_is_read_as_often_as_it_is_named(self) -> None:
        """The machine's own books: what it compares with would be worth nothing if they were wrong."""
        named = np.bincount([page for table in self.pool.tables.values() for page in table], minlength=NUM_PAGES)
        assert (named == self.pool.readers).all()

    def teardown(self) -> None:
        self.backend.close()

    # -- what the rules share --------------------------------------------------------------------------------------

    def expect_right(self, trial: Trial, observed: Observed) -> None:
        wrong = off(trial, observed)
        assert wrong is None, f"lengths {trial.case.structure.seqlens_kv}: {wrong}"

    def picked(self, pick: int) -> Handle:
        return self.live[pick % len(self.live)]

    def room(self, handle: Handle) -> int:
        """Tokens that can be appended whatever is shared: a page may have to be copied first."""
        used = self.pool.seqlen_kv(handle) % PAGE_SIZE
        spare = (PAGE_SIZE - used) % PAGE_SIZE if self.pool.num_free else 0
        return spare + max(self.pool.num_free - 1, 0) * PAGE_SIZE if used else self.pool.num_free * PAGE_SIZE

    def write_tokens(self, handle: Handle, count: int) -> None:
        """Appends tokens, copies what others read too, and writes the new keys and values."""
        first = self.pool.seqlen_kv(handle)
        for copied in self.pool.append(handle, count):
            self.copy_tokens(copied)
        positions = np.arange(first, first + count)
        slots = self.pool.page_table(handle)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        self.drawn += 1
        for i, cache in enumerate((self.k, self.v)):
            shape = (count, *cache.shape[1:])
            cache[slots] = philox.integers(2 * self.drawn + i, TOKEN_STREAM, shape, low=-3, high=4)

    def copy_tokens(self, copied: PageCopy) -> None:
        """Copies the first tokens of a page."""
        for cache in (self.k, self.v):
            source, target = copied.source * PAGE_SIZE, copied.target * PAGE_SIZE
            cache[target : target + copied.num_tokens] = cache[source : source + copied.num_tokens]

    def trial(self, *, lists: bool, seed: int) -> Trial:
        """The requests as they are, one query row each, causal; every position listed, or about half of them."""
        lengths = tuple(self.pool.seqlen_kv(handle) for handle in self.live)
        structure = Structure(
            dtype=self.dtype,
            seqlens_q=(1,) * len(lengths),
            seqlens_kv=lengths,
            num_qo_heads=NUM_QO_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim_qk=HEAD_DIM,
            head_dim_vo=HEAD_DIM,
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            page_table=tuple(tuple(self.pool.page_table(handle).tolist()) for handle in self.live),
            candidates=CandidateStructure(lists=drawn_lists(lengths, seed), sharing="shared") if lists else None,
            mask_rule=Causal(),
            sm_scale=0.25,
        )
        case = Case(
            id="stateful", level="L3", operation="forward", structure=structure, values="zero_q", seed=seed, clauses=()
        )
        trial = Trial(case, self.backend)
        q = philox.integers(seed, QUERY_STREAM, trial.values.q.shape, low=-2, high=3).astype(np.float64)
        trial.values = Values(q, self.k.copy(), self.v.copy(), trial.values.dout, trial.values.dlse)
        return trial


def captured(session: Session, handle: Any, seen: Observed) -> tuple[Any, Any]:
    """The handle, and a launch to be replayed after it is planned again; None where the backend or device has none.

    It is captured while the plan is one of shorter requests, which a replay must not go on to have.
    """
    trial, backend = session.trial, session.trial.backend
    if not offers_steps(backend, "plan", "run", "replan", "capture"):
        return handle, None
    short = other_problems(trial).get("half the keys", trial)
    handle = session.plan_again(handle, short)
    try:
        launch = backend.capture(handle, seen.tensors)
    except NotImplementedError:
        launch = None
    return session.plan_again(handle, trial), launch


def drawn_lists(lengths: tuple[int, ...], seed: int) -> tuple[tuple[int, ...], ...]:
    """About half of each request's positions, in no order; the last one among them."""
    lists = []
    for n, length in enumerate(lengths):
        order = philox.permutation(seed + n, CHOICE_STREAM, length).tolist()
        lists.append(tuple(dict.fromkeys((*order[: length // 2], length - 1))))
    return tuple(lists)


def fits(trial: Trial, first: Trial) -> bool:
    """Whether a problem needs no more of anything than the one that a plan was made for. [PLAN-CAPACITY]"""
    now, then = build_problem(trial.case.structure), build_problem(first.case.structure)
    is_alike = now.batch_size == then.batch_size and (now.candidates is None) == (then.candidates is None)
    if not is_alike or (now.seqlen_kv > then.seqlen_kv).any():
        return False
    if now.candidates is None or then.candidates is None:
        return True
    return bool((np.diff(now.candidates.indptr) <= np.diff(then.candidates.indptr)).all())


def move_page(pool: PagePool, source: int, target: int, caches: tuple[Any, ...]) -> None:
    """Moves a page to a free one, in the caches, the readers' counts and every table."""
    for cache in caches:
        cache[target * PAGE_SIZE : (target + 1) * PAGE_SIZE] = cache[source * PAGE_SIZE : (source + 1) * PAGE_SIZE]
    pool.readers[target], pool.readers[source] = pool.readers[source], 0
    for row, table in pool.tables.items():
        pool.tables[row] = [target if page == source else page for page in table]


def check_lives(
    make_backend: Callable[[], Backend],
    *,
    examples: int = 20,
    steps: int = 20,
    dtype: Dtype = "float32",
    derandomize: bool = True,
    shrinks: bool = True,  # which takes a few hundred lives more once one has failed
) -> None:
    """Lives that Hypothesis draws, each before a fresh backend.

    Raises AssertionError for a life that ends in a wrong answer, the shortest one found, and BackendCrash where the
    backend raises.
    """
    attributes = {"make_backend": staticmethod(make_backend), "dtype": dtype}
    machine = type("LifeOfBackend", (Life,), attributes)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=derandomize,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
