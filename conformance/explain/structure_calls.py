"""Every answer that the judge's checks get of the structures a backend builds, in a form that compares with ==."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace

import msgspec
import numpy as np

from attnconform.conformance.backend import Backend
from attnconform.conformance.structures import METHODS, Pool, offers

SIGNIFICANT = 10  # digits to which figures are compared
KEYS = ("plan_key", "mask_key")  # whose results say nothing but which of them are equal
HANDLES = ("allocate", "fork")  # whose results a pool alone can read
POOL_METHODS = tuple(name for name in vars(Pool) if not name.startswith("_"))
Log = list[object]


def record_structures(backend: Backend) -> Log:
    """A log that every structure the backend builds from now on is added to, with whether it changed its inputs."""
    log: Log = []
    for name in METHODS:
        if offers(backend, name):
            setattr(backend, name, recorded(log, name, getattr(backend, name)))
    return log


def recorded(log: Log, name: str, method: Callable[..., object]) -> Callable[..., object]:
    """A method that adds what it gives to the log; what it asks of itself meanwhile is no answer."""
    keys: list[object] = []

    def call(*arguments: object) -> object:
        before, length = plain(arguments), len(log)
        try:
            result = method(*arguments)
        except Exception as error:
            log[length:] = [(name, "raised", type(error).__name__)]
            raise
        log[length:] = [(name, told(name, result, keys), plain(arguments) == before)]
        return RecordedPool(log, result) if name == "page_pool" else result

    return call


def told(name: str, result: object, keys: list[object]) -> object:
    """What a result says; a key or an address, only which of the earlier ones it equals."""
    if name == "page_pool" or name in HANDLES:
        return None
    if name in KEYS:
        return first_seen(result, keys)
    if name == "plan_each" and isinstance(result, list | tuple):
        places: list[object] = []
        return tuple(plain(replace(plan, address=first_seen(plan.address, places))) for plan in result)
    return plain(result)


def first_seen(value: object, values: list[object]) -> int:
    """How many other values came before a value first did."""
    if value not in values:
        values.append(value)
    return values.index(value)


class RecordedPool:
    """A pool whose every answer is added to the log."""

    def __init__(self, log: Log, pool: object) -> None:
        for name in POOL_METHODS:
            setattr(self, name, recorded(log, name, getattr(pool, name)))


def plain(value: object) -> object:
    """Nested tuples of a value's numbers, so that two answers compare with ==."""
    if isinstance(value, np.ndarray):
        return value.shape, tuple(plain(x) for x in value.ravel().tolist())
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return f"{value:.{SIGNIFICANT}g}"
    if isinstance(value, list | tuple):
        return tuple(plain(x) for x in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted((plain(x) for x in value), key=repr))
    if is_dataclass(value):
        return tuple(plain(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, msgspec.Struct):
        return tuple(plain(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, dict):
        return tuple((str(key), plain(x)) for key, x in value.items())
    if value is None or isinstance(value, str):
        return value
    # a function, or an object of the backend's own: its address would be different every time
    return type(value).__name__
