"""What the interpreter's operations do to arrays, quicker: the same numbers by fewer calls.

Each replacement knows the function it stands for by its source, as those of `quickened_language` do.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from attnconform.conformance.adapters.quickened_language import are_known

ADDRESS_BITS = 64
# what an operator of tensors asks of the semantic, and whether it stands on the right
OPERATORS = {
    "__add__": ("add", False), "__radd__": ("add", True), "__sub__": ("sub", False), "__rsub__": ("sub", True),
    "__mul__": ("mul", False), "__rmul__": ("mul", True),
}  # fmt: skip
# of Triton 3.9.0
SOURCES = {
    "TensorHandle.__post_init__": "f81df5fe7b504bef",
    "TensorHandle.set_attr": "67410f648e757c0f",
    "InterpreterBuilder.binary_op": "ca085f65855c0fa4",
    "InterpreterBuilder.create_expand_dims": "c0530007993d215b",
    "ReduceOps.apply_impl": "964ac461762dc390",
    "ReduceOps.min_max": "070cb11311ff6e47",
    "block_type.to_ir": "edc01974ba35f404",
    "add": "7feb6740afcd1d55",
    "sub": "3dc3041d55aedea3",
    "mul": "31127baed4e0622b",
    "tensor.__add__": "c1cd636a0cbcf418",
    "tensor.__radd__": "b06f3cc384092572",
    "tensor.__sub__": "d0572bb5033456c4",
    "tensor.__rsub__": "fd870107d4f2bb19",
    "tensor.__mul__": "7724a20f830972b3",
    "tensor.__rmul__": "469c5adb0c24dd74",
    "tensor.__getitem__": "fbd03ee0552f27f9",
    "builtin": "c6cdae3101070eab",
    "_patch_attr": "e0c1b7d65a2463cd",
}


def quicken_arrays() -> bool:
    """Has the interpreter's operations work so from now on; False, and nothing done, for another Triton."""
    from triton.language import core
    from triton.runtime import interpreter

    owners = (interpreter.TensorHandle, interpreter.InterpreterBuilder, interpreter.ReduceOps, core.block_type)
    functions = {"builtin": core.builtin, "_patch_attr": interpreter._patch_attr}
    functions |= {name: inspect.unwrap(getattr(core, name)) for name in ("add", "sub", "mul")}
    functions |= {f"tensor.{name}": inspect.unwrap(getattr(core.tensor, name)) for name in (*OPERATORS, "__getitem__")}
    if not are_known(SOURCES, owners, functions):
        return False
    quicken_handles(interpreter)
    quicken_builder(interpreter.InterpreterBuilder)
    quicken_reductions(interpreter.ReduceOps)
    interpreter._patch_attr = without_wrapper(core, interpreter)
    keep_block_types(core, interpreter.interpreter_builder)
    return True


def quicken_handles(interpreter: Any) -> None:
    """A handle has no table of attributes of its own before one is set; what is too wide for its dtype is refused."""
    make = interpreter.TensorHandle.__init__
    none: dict[str, Any] = {}

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        bits = dtype.__dict__.get("primitive_bitwidth", ADDRESS_BITS)
        if attr is not None or (data.itemsize * 8 > bits and data.itemsize > 1):
            make(self, data, dtype, {} if attr is None else attr)
        else:
            self.data, self.dtype, self.attr = data, dtype, none

    def set_attr(self: Any, key: str, value: Any) -> None:
        self.attr = {**self.attr, key: value}

    interpreter.TensorHandle.__init__ = init_handle
    interpreter.TensorHandle.set_attr = set_attr


def quicken_builder(builder: Any) -> None:
    """Bits of two bools need no wider type, and a new axis no list of axes."""
    from triton.runtime.interpreter import TensorHandle

    binary, expand = builder.binary_op, builder.create_expand_dims
    of_bits = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)

    def quick_binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if op in of_bits and lhs.data.dtype == np.bool_ and rhs.data.dtype == np.bool_:
            return TensorHandle(op(lhs.data, rhs.data), lhs.dtype.scalar)
        return binary(self, lhs, rhs, op)

    def quick_expand(self: Any, arg: Any, axis: int) -> Any:
        if axis < 0:
            return expand(self, arg, axis)
        return TensorHandle(arg.data[(*((slice(None),) * axis), None)], arg.dtype.scalar)

    builder.binary_op, builder.create_expand_dims = quick_binary, quick_expand


def quicken_reductions(reduction: Any) -> None:
    """numpy's largest and smallest numbers but for NaN, without its warning where all are NaN."""
    pick = reduction.min_max
    plain = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def quick_min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        return pick(self, input, plain.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    reduction.min_max = quick_min_max


def without_wrapper(core: Any, interpreter: Any) -> Callable[..., None]:
    """Triton's replacement of one built-in function, which calls it without the wrapper that asks for a semantic."""
    wrapper_code = core.program_id.__code__
    semantic = interpreter.interpreter_semantic
    at_once = {name: operator_of(core, semantic, *how) for name, how in OPERATORS.items()}
    at_once["__getitem__"] = with_new_axis(core, semantic)

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if getattr(member, "__code__", None) is wrapper_code else member

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, at_once.get(name, interpreted) if obj is core.tensor else interpreted)

    return patch_attr


def operator_of(core: Any, semantic: Any, operation: str, is_right: bool) -> Callable[[Any, Any], Any]:
    """An operator of tensors, straight to what it asks of the semantic."""

    def operate(tensor: Any, other: Any) -> Any:
        other = core._unwrap_if_constexpr(other)
        left, right = (other, tensor) if is_right else (tensor, other)
        return getattr(semantic, operation)(left, right, sanitize_overflow=True)

    return operate


def with_new_axis(core: Any, semantic: Any) -> Callable[[Any, Any], Any]:
    """An index of a tensor; of a row or a column, straight to the new axis."""
    index, whole = core.tensor.__getitem__.__wrapped__, slice(None)

    def indexed(tensor: Any, slices: Any) -> Any:
        if type(slices) is tuple and len(slices) == 2 and len(tensor.type.__dict__.get("sizes", ())) == 1:
            for axis, kept in ((0, slices[1]), (1, slices[0])):
                if slices[axis] is None and type(kept) is slice and kept == whole:
                    return semantic.expand_dims(tensor, axis)
        return index(tensor, slices, _semantic=semantic)

    return indexed


def keep_block_types(core: Any, builder: Any) -> None:
    """What a block type is converted to is, for the interpreter, the type."""
    convert = core.block_type.to_ir

    def to_ir(self: Any, other: Any) -> Any:
        return self if other is builder else convert(self, other)

    core.block_type.to_ir = to_ir
