"""A backend's page pool, driven beside plain lists of tokens: forks, copies, pages given back, places reused."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.offering import ask, lacks, wrong
from attnconform.conformance.judge.trial import BackendCrash, Trial, first_line
from attnconform.conformance.judge.verdict import Finding
from attnconform.conformance.structures import Pool
from attnconform.reference.coordinates import IntArray

NUM_PAGES, NUM_ROWS = 9, 4
NUM_EVENTS = 60
NUM_REUSES = 300  # of one place: more than a byte counts
REFUSED = object()


@dataclass
class Live:
    """A request under way, and the tokens that it must read back."""

    handle: Any
    tokens: list[int]


@dataclass
class Drive:
    """A pool, the memory that its pages stand for, and what every request should find there."""

    trial: Trial
    pool: Pool
    page_size: int
    memory: IntArray  # (NUM_PAGES, page_size) token names
    live: list[Live] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)  # handles
    num_tokens: int = 0  # names given so far

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a call answers, or REFUSED. Raises BackendCrash for an error that is no refusal."""
        self.trial.calls += 1
        try:
            return function(*arguments)
        except self.trial.backend.refusals:
            return REFUSED
        except Exception as error:
            name = getattr(function, "__name__", "a method")
            raise BackendCrash(f"{name} of the pool raised {type(error).__name__}: {first_line(error)}") from error

    def table(self, one: Live) -> list[int]:
        """A request's pages as the pool says; none where it refuses a request under way."""
        pages = self.attempt(self.pool.page_table, one.handle)
        return [] if pages is REFUSED else [int(page) for page in pages]

    def others_pages(self, one: Live) -> set[int]:
        """Pages that requests but this one read."""
        return {page for other in self.live if other is not one for page in self.table(other)}

    def num_needed(self, one: Live, count: int) -> int:
        """Pages that appending takes from the pool: new ones, and one for a last page that others read."""
        used, length = len(one.tokens) % self.page_size, len(one.tokens)
        is_shared = bool(count and used and self.table(one)[-1] in self.others_pages(one))
        return -(-(length + count) // self.page_size) - -(-length // self.page_size) + is_shared

    def num_free(self) -> int:
        return NUM_PAGES - len({page for one in self.live for page in self.table(one)})


@checks("COORD-FORK", "COORD-COPY-ON-WRITE", "COORD-FREE", "COORD-GENERATION", "PLAN-CAPACITY")
def check_page_pool(trial: Trial) -> list[Finding]:
    """Through many turns every request reads its own tokens, ended ones read nothing, and no page is lost."""
    if lacks(trial, "page_pool"):
        return []
    draw = Draw(trial.case.seed)
    page_size = draw.choice((2, 3, 4))
    pool: Pool = ask(trial, "page_pool", NUM_PAGES, page_size, NUM_ROWS)
    drive = Drive(trial, pool, page_size, np.full((NUM_PAGES, page_size), -1, dtype=np.int64))
    found = opening(drive)
    for _ in range(NUM_EVENTS):
        found = found or turn(drive, draw)
    return found[:1] or places_reused(drive) or everything_comes_back(drive)


def opening(drive: Drive) -> list[Finding]:
    """A fork inside a page, both sides of which grow; then the older ends, and another takes its place and pages."""
    size = drive.page_size
    return (
        allocate(drive)
        or append(drive, drive.live[0], 2 * size - 1)
        or fork(drive, drive.live[0], 2 * size - 1)
        or append(drive, drive.live[1], 1)
        or append(drive, drive.live[0], 1)
        or fork(drive, drive.live[1], size)
        or free(drive, drive.live[0])
        or allocate(drive)
        or append(drive, drive.live[-1], 2 * size)
    )


def turn(drive: Drive, draw: Draw) -> list[Finding]:
    """One event, and whether everybody's tokens are still there."""
    if not drive.live or draw.integer(0, 9) == 0:
        return allocate(drive)
    one = draw.choice(drive.live)
    match draw.choice(("append", "append", "append", "fork", "fork", "truncate", "free", "use an ended one")):
        case "append":
            return append(drive, one, draw.integer(1, 2 * drive.page_size))
        case "fork":
            return fork(drive, one, draw.integer(0, len(one.tokens)))
        case "truncate":
            return truncate(drive, one, draw.integer(0, len(one.tokens)))
        case "free":
            return free(drive, one)
        case _:
            return use_ended(drive, draw)


def allocate(drive: Drive) -> list[Finding]:
    """A request without tokens comes in."""
    handle = drive.attempt(drive.pool.allocate)
    return admit(drive, handle, [], "COORD-GENERATION") or contents(drive, "COORD-FREE", "a request was admitted")


def admit(drive: Drive, handle: Any, tokens: list[int], clause: str) -> list[Finding]:
    """Takes a new request in: refused where there is no place for it, and never under an old handle."""
    if len(drive.live) == NUM_ROWS:
        is_refused = handle is REFUSED
        return [] if is_refused else [wrong(f"{NUM_ROWS + 1} requests in {NUM_ROWS} places", "PLAN-CAPACITY")]
    if handle is REFUSED:
        return [wrong(f"{len(drive.live)} requests in {NUM_ROWS} places, and a new one is refused", clause)]
    if handle in drive.ended or any(handle == other.handle for other in drive.live):
        return [wrong(f"a new request gets handle {handle} of an earlier one", "COORD-GENERATION", state="FAIL_race")]
    drive.live.append(Live(handle, tokens))
    return []


def append(drive: Drive, one: Live, count: int) -> list[Finding]:
    """A request grows: accepted exactly where it fits, copies made as the pool says, tokens written where it says."""
    before, others = drive.table(one), drive.others_pages(one)
    needed, num_free = drive.num_needed(one, count), drive.num_free()
    copies = drive.attempt(drive.pool.append, one.handle, count)
    if (copies is REFUSED) != (needed > num_free):
        done = "refused" if copies is REFUSED else "accepted"
        clause = "COORD-FREE" if copies is REFUSED else "PLAN-CAPACITY"
        return [wrong(f"{done} an append that takes {needed} pages where {num_free} are free", clause)]
    if copies is REFUSED:
        return contents(drive, "PLAN-CAPACITY", "an append was refused")
    pages = drive.table(one)
    strays = [page for page in [*pages, *(p for c in copies for p in c[:2])] if not 0 <= page < NUM_PAGES]
    if strays:
        return [wrong(f"page {strays[0]} of a pool of {NUM_PAGES}", "COORD-FREE")]
    for source, target, num_tokens in copies:
        drive.memory[target, :num_tokens] = drive.memory[source, :num_tokens]
    if (set(pages) - set(before)) & others:
        return [wrong("a page is handed out that another request reads", "COORD-FREE")]
    return write(drive, one, pages, count, others)


def write(drive: Drive, one: Live, pages: list[int], count: int, others: set[int]) -> list[Finding]:
    """Writes the new tokens where the table says, as a kernel would, and reads everybody's."""
    start = len(one.tokens)
    for position in range(start, start + count):
        page, offset = divmod(position, drive.page_size)
        if page >= len(pages):
            return [wrong(f"position {position} has no page after an append", "COORD-FREE")]
        if pages[page] in others:
            return [wrong(f"a token is written to page {pages[page]}, which others read", "COORD-COPY-ON-WRITE")]
        drive.memory[pages[page], offset] = drive.num_tokens
        one.tokens.append(drive.num_tokens)
        drive.num_tokens += 1
    return contents(drive, "COORD-COPY-ON-WRITE", "a request grew")


def fork(drive: Drive, one: Live, prefix: int) -> list[Finding]:
    """A request begins with the first tokens of another, on the same pages."""
    handle = drive.attempt(drive.pool.fork, one.handle, prefix)
    was_full = len(drive.live) == NUM_ROWS
    found = admit(drive, handle, one.tokens[:prefix], "COORD-FORK")
    if found or was_full:
        return found
    ours, theirs = drive.table(drive.live[-1]), drive.table(one)[: -(-prefix // drive.page_size)]
    if ours != theirs:
        return [wrong(f"a fork of {prefix} tokens reads pages {ours}, and the other one {theirs}", "COORD-FORK")]
    return contents(drive, "COORD-FORK", "a request was forked")


def truncate(drive: Drive, one: Live, kept: int) -> list[Finding]:
    """A request keeps its first tokens alone."""
    if drive.attempt(drive.pool.truncate, one.handle, kept) is REFUSED:
        return [wrong(f"keeping {kept} of {len(one.tokens)} tokens is refused", "COORD-FREE")]
    del one.tokens[kept:]
    return contents(drive, "COORD-FREE", "a request was shortened")


def free(drive: Drive, one: Live) -> list[Finding]:
    """A request ends."""
    if drive.attempt(drive.pool.free, one.handle) is REFUSED:
        return [wrong("ending a request is refused", "COORD-FREE")]
    drive.live = [other for other in drive.live if other is not one]
    drive.ended.append(one.handle)
    return contents(drive, "COORD-FREE", "a request ended")


def use_ended(drive: Drive, draw: Draw) -> list[Finding]:
    """Whether a handle of an ended request is refused by everything that takes one."""
    if not drive.ended:
        return []
    handle = draw.choice(drive.ended)
    uses: dict[str, Callable[[], Any]] = {
        "page_table": lambda: drive.pool.page_table(handle),
        "append": lambda: drive.pool.append(handle, 1),
        "fork": lambda: drive.pool.fork(handle, 0),
        "free": lambda: drive.pool.free(handle),
    }
    name = draw.choice(list(uses))
    if drive.attempt(uses[name]) is REFUSED:
        return contents(drive, "COORD-GENERATION", "an ended request was refused")
    message = f"{name} takes handle {handle} of a request that has ended"
    return [Finding(state="NOT_REFUSED", clauses=("COORD-GENERATION",), message=message)]


def contents(drive: Drive, clause: str, what: str) -> list[Finding]:
    """A finding where a request's length or tokens are not what they should be."""
    for one in drive.live:
        length, pages = drive.attempt(drive.pool.seqlen_kv, one.handle), drive.table(one)
        if length != len(one.tokens) or len(pages) * drive.page_size < len(one.tokens):
            return [wrong(f"after {what}: one of {len(one.tokens)} tokens has {len(pages)} pages", clause)]
        read = drive.memory[pages].ravel()[: len(one.tokens)].tolist() if pages else []
        if read != one.tokens:
            return [wrong(f"after {what}: a request reads tokens {read}, not {one.tokens}", clause)]
    return []


def everything_comes_back(drive: Drive) -> list[Finding]:
    """After all requests have ended, one may have the whole pool."""
    for one in list(drive.live):
        if found := free(drive, one):
            return found
    handle = drive.attempt(drive.pool.allocate)
    found = admit(drive, handle, [], "COORD-FREE")
    if found or drive.attempt(drive.pool.append, handle, NUM_PAGES * drive.page_size) is not REFUSED:
        return found
    return [wrong(f"no request reads a page, and {NUM_PAGES} pages cannot be had", "COORD-FREE")]


def places_reused(drive: Drive) -> list[Finding]:
    """Requests that come and go one after the other, each under a handle of its own. [COORD-GENERATION]"""
    if len(drive.live) == NUM_ROWS and (found := free(drive, drive.live[-1])):
        return found
    for _ in range(NUM_REUSES):
        if found := admit(drive, drive.attempt(drive.pool.allocate), [], "COORD-GENERATION"):
            return found
        if found := free(drive, drive.live[-1]):
            return found
    return []
