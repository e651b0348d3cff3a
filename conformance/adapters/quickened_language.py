"""The types and the checks of types of `triton.language`, quicker: what follows from types alone is worked out once.

Under the interpreter every operation of a kernel makes its types anew, each with a tuple of constants and a name that
nobody reads, and broadcasts both operands although numpy does; for small tiles that is most of the time. Here equal
types are one object, what an operation makes of two types is remembered, and numpy is left to broadcast.

Each replacement gives what the function gives that it stands for, and knows that function by its source: a Triton whose
function reads otherwise keeps its own. In one thing Triton's gives less: it spreads one answer of yes or no over a tile
as numbers, which no load takes for a mask; left to numpy, it stays an answer, as it is on a GPU.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

DIGITS = 16  # of a source's digest
NUMBERS = (bool, int, float)
MOST_CONSTANTS = 4096  # kept; then all are dropped
# of Triton 3.9.0
SOURCES = {
    "block_type.__init__": "403f4b016ec5c2c3",
    "pointer_type.__init__": "6597a7059f474ba8",
    "tensor.__init__": "d9b043b5c9897657",
    "dtype.is_int": "26a99a3497eb1854",
    "dtype.is_floating": "86ff62315f457b0e",
    "dtype.__eq__": "b0fd419d9dbeadef",
    "TritonSemantic.broadcast_impl_value": "90c3a175f67942b0",
    "TritonSemantic.binary_op_type_checking_impl": "1d2ffc4e5a2ea4a7",
    "TritonSemantic._cast_to_computation_type": "dbca816aa2a28d31",
    "TritonSemantic.scalar_constant": "ca91d6ef2726dde2",
    "TritonSemantic.cast": "b69dba3389e69c97",
}


def quicken_language() -> bool:
    """Has the types and checks work so from now on; False, and nothing done, for another Triton."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_semantic

    if not are_known(SOURCES, (core.block_type, core.pointer_type, core.tensor, core.dtype, TritonSemantic)):
        return False
    share_types(core)
    quicken_tensors(core)
    quicken_kinds(core)
    quicken_semantic(core, interpreter_semantic)
    return True


def are_known(
    sources: dict[str, str], owners: Sequence[type], functions: Mapping[str, Any] = MappingProxyType({})
) -> bool:
    """Whether methods, as CLASS.METHOD, and functions have the sources that replacements were written for."""
    found = dict(functions)
    for name in sources:
        owner, _, method = name.rpartition(".")
        found.update((name, getattr(kind, method, None)) for kind in owners if kind.__name__ == owner)
    return all(source_digest(found.get(name)) == digest for name, digest in sources.items())


def source_digest(function: Any) -> str:
    """Of a function's source; empty where there is none."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:DIGITS]
    except (OSError, TypeError):
        return ""


def share_types(core: Any) -> None:
    """Equal block types are one object, and so are equal pointer types; a block type has its tensors' shape ready."""
    blocks: dict[Any, Any] = {}
    pointers: dict[Any, Any] = {}
    make_block, make_pointer = core.block_type.__init__, core.pointer_type.__init__

    def new_block(cls: Any, element_ty: Any = None, shape: Any = None, *_: Any, **__: Any) -> Any:
        if cls is not core.block_type or type(element_ty) not in (core.dtype, core.pointer_type):
            return object.__new__(cls)
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if key not in blocks:
            made = object.__new__(cls)
            make_block(made, element_ty, shape)
            made.sizes = sizes
            made.of_tensors = (core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(made.numel))
            blocks[key] = made
        return blocks[key]

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if "sizes" not in self.__dict__:
            make_block(self, element_ty, shape)

    def new_pointer(cls: Any, element_ty: Any = None, address_space: str = "global", const: bool = False) -> Any:
        if cls is not core.pointer_type or type(element_ty) is not core.dtype:
            return object.__new__(cls)
        key = (element_ty.name, address_space, const)
        if key not in pointers:
            made = object.__new__(cls)
            make_pointer(made, element_ty, address_space, const)
            pointers[key] = made
        return pointers[key]

    def init_pointer(self: Any, element_ty: Any, address_space: str = "global", const: bool = False) -> None:
        if "name" not in self.__dict__:
            make_pointer(self, element_ty, address_space, const)

    core.block_type.__new__, core.block_type.__init__ = staticmethod(new_block), init_block
    core.pointer_type.__new__, core.pointer_type.__init__ = staticmethod(new_pointer), init_pointer


def quicken_tensors(core: Any) -> None:
    """A tensor takes its shape from its type."""
    make = core.tensor.__init__
    of_scalars = (core.tuple([]), core.constexpr(1))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("of_tensors") if type.is_block() else of_scalars
        if known is None:
            make(self, handle, type)
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    core.tensor.__init__ = init_tensor


def quicken_kinds(core: Any) -> None:
    """Whether a dtype is an integer or a float is looked up, and a dtype is equal to itself at once."""
    dtype, compare = core.dtype, core.dtype.__eq__
    integers, floats = frozenset((*dtype.SINT_TYPES, *dtype.UINT_TYPES)), frozenset(dtype.FP_TYPES)

    def equals(self: Any, other: Any) -> Any:
        return self is other or compare(self, other)

    dtype.is_int = lambda self: self.name in integers
    dtype.is_floating = lambda self: self.name in floats
    dtype.__eq__ = equals


def quicken_semantic(core: Any, semantic: Any) -> None:
    """What operations do to types is remembered; blocks of one shape are broadcast already.

    Of the interpreter's own semantic: one that compiles has no numpy to leave the broadcasting to.
    """
    cast, broadcast = semantic.cast, semantic.broadcast_impl_value

    def quick_cast(input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        return input if input.dtype is dst_ty.scalar else cast(input, dst_ty, fp_downcast_rounding)

    def quick_broadcast(lhs: Any, rhs: Any) -> Any:
        sizes = lhs.type.__dict__.get("sizes")
        is_done = sizes is not None and sizes == rhs.type.__dict__.get("sizes")
        return (lhs, rhs) if is_done else broadcast(lhs, rhs)

    semantic.cast, semantic.broadcast_impl_value = quick_cast, quick_broadcast
    semantic.scalar_constant = remembered_constants(semantic.scalar_constant)
    semantic._cast_to_computation_type = remembered_constants(semantic._cast_to_computation_type)
    semantic.binary_op_type_checking_impl = remembered_types(core, semantic)


def remembered_constants(make: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors of one number, made once; a zero's sign is its own.

    Those of bfloat16 are made anew: how it is rounded may be replaced meanwhile (`third_party_interpreter`).
    """
    known: dict[Any, Any] = {}

    def constant(value: Any, dtype: Any) -> Any:
        if type(value) not in NUMBERS or value != value or dtype is None or dtype.name == "bf16":
            return make(value, dtype)
        key = (type(value), value or str(value), dtype.name)
        if key not in known:
            if len(known) >= MOST_CONSTANTS:
                known.clear()
            known[key] = make(value, dtype)
        return known[key]

    return constant


def remembered_types(core: Any, semantic: Any) -> Callable[..., Any]:
    """The check of two operands, whose outcome depends on their types, and of numbers on the type that holds them.

    Operands are cast and typed as the check does it. Their numbers are left to numpy to broadcast: it makes of them
    the shape that the types have, in every operation that takes two operands so.
    """
    check, tensor = semantic.binary_op_type_checking_impl, core.tensor
    known: dict[Any, tuple[Any, Any, Any]] = {}  # types that come out, and those that go in, which keep their ids so

    def key_of(operand: Any) -> Any:
        if type(operand) is tensor:
            return id(operand.type)
        return semantic.to_tensor_type(operand).name if type(operand) in NUMBERS else None

    def as_typed(operand: Any, wanted: Any) -> Any:
        if type(operand) is not tensor:
            operand = semantic._cast_to_computation_type(operand, wanted.scalar)
        elif operand.type is wanted:
            return operand
        elif operand.dtype is not wanted.scalar:
            operand = semantic.cast(operand, wanted.scalar)
        return operand if operand.type is wanted else tensor(operand.handle, wanted)

    def remembered(lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        left, right = key_of(lhs), key_of(rhs)
        if left is None or right is None:
            return check(lhs, rhs, *flags, **named)
        key = (left, right, flags, *named.items())
        if key not in known:
            a, b = check(lhs, rhs, *flags, **named)
            known[key] = a.type, b.type, (getattr(lhs, "type", None), getattr(rhs, "type", None))
            return a, b
        to_left, to_right, _ = known[key]
        return as_typed(lhs, to_left), as_typed(rhs, to_right)

    return remembered
