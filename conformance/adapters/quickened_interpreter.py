"""Triton's interpreter, quicker: what it does anew at every call of a function within a kernel is done once.

A call within a running kernel replaces the built-in functions of `triton.language` once more, although the kernel's own
launch has; for small tiles that is a third of the time. A launch looks through all of `triton.language` for what to
replace. Every operation makes a table of all dtypes to look one up. And every sum of integers is made in 64 bits as
well, for an assertion that only a debugging builder would make. Types are in `quickened_language`, arrays in
`quickened_arrays`.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from attnconform.conformance.adapters.quickened_arrays import quicken_arrays
from attnconform.conformance.adapters.quickened_language import quicken_language

SINCE_TRITON_3_6 = ("fn",)  # parameters of the function that is replaced


def quicken() -> bool:
    """Has Triton's interpreter work so from now on; False, and nothing done, for a Triton that works otherwise."""
    from triton.runtime import interpreter

    patch, choose = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_get_np_dtype", None)
    if isinstance(patch, Once):
        return True
    if patch is None or choose is None or tuple(inspect.signature(patch).parameters) != SINCE_TRITON_3_6:
        return False
    interpreter._patch_lang, interpreter._get_np_dtype = Once(patch), Remembered(choose)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    quicken_language()
    quicken_arrays()
    return True


class Once:
    """Triton's replacement of built-in functions where it is not in force; what is replaced is looked for once."""

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self.replace = replace
        self.empty: Callable[[], Any] = NothingToRestore  # a scope, of Triton's own
        self.made: dict[tuple[ModuleType, ...], list[tuple[Any, str, Any]]] = {}  # owner, name, function; by languages

    def __call__(self, fn: Any) -> Any:
        """What restores the functions in the end: a scope, or one with nothing in it."""
        found = languages(fn)
        if all(is_replaced(module) for module in found):
            return NothingToRestore()
        if found in self.made:
            scope = self.empty()
            for change in self.made[found]:
                scope.set_attr(*change)
            return scope
        scope = self.replace(fn)
        self.empty = type(scope)
        self.made[found] = [(owner, name, owner.__dict__[name]) for owner, name, _ in scope._changes]
        return scope


class Remembered:
    """Triton's choice of a numpy dtype, made once for every element type; a pointer's is that of an address."""

    def __init__(self, choose: Callable[[Any], Any]) -> None:
        self.choose = choose
        self.known: dict[str, Any] = {}  # by the element type's name

    def __call__(self, tt_dtype: Any) -> Any:
        element = tt_dtype.scalar
        if element.is_ptr():
            return self.choose(element)
        if element.name not in self.known:
            self.known[element.name] = self.choose(element)
        return self.known[element.name]


class NothingToRestore:
    """The scope of a call within a kernel, whose launch restores everything."""

    def restore(self) -> None:
        pass


@cache
def languages(fn: Any) -> tuple[ModuleType, ...]:
    """The modules of `triton.language` that a function names its built-in functions by."""
    import triton.language as tl

    return tuple(value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core))


def is_replaced(language: ModuleType) -> bool:
    """Whether a module's built-in functions are the interpreter's now."""
    from triton.language import core

    return not core.is_builtin(language.program_id)
