"""Triton's interpreter, quicker: what it does anew at every call of a function within a kernel is done once.

A call within a running kernel replaces the built-in functions of `triton.language` once more, although the kernel's own
launch has; for small tiles that is a third of the time. Every operation makes a table of all dtypes to look one up. And
every sum of integers is made in 64 bits as well, for an assertion that only a debugging builder would make.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

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
    return True


class Once:
    """Triton's replacement of built-in functions, where it is not in force already."""

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self.replace = replace

    def __call__(self, fn: Any) -> Any:
        """What restores the functions in the end: a scope, or one with nothing in it."""
        if all(is_replaced(module) for module in languages(fn)):
            return NothingToRestore()
        return self.replace(fn)


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
