"""How functions are compiled with numba, and how the machine code is kept.

    kernel        called from Python; compiled on import, for one signature
    lazy_kernel   called from Python; compiled at its first call, for the types of its arguments
    subroutine    called by kernels only
    inlined       the same, copied into its callers

The machine code of kernels is kept on disk, so that only the first process compiles. numba's own
cache notices when the file changes in which a kernel stands, but not when a constant or a function
changes that the kernel has from another module: the new process would go on with the old machine
code. Here the name of a cache file has a hash of all that a kernel is made of (`fingerprint`), so
that what was compiled from other sources is never found, and nothing has to be removed by hand.

numba chooses the folder: `NUMBA_CACHE_DIR` if it is set; `__pycache__` beside the module; where
that can't be written, the user's cache folder. Where none can be written, every process compiles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from enum import EnumType
from functools import cached_property
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
from numba.core.dispatcher import Dispatcher

__all__ = [
    "BOOLEAN",
    "INT",
    "INTS",
    "NATURAL",
    "NATURALS",
    "OCTETS",
    "OUT_INTS",
    "OUT_NATURALS",
    "OUT_OCTETS",
    "OUT_TABLE",
    "OUT_TRUTHS",
    "TRUTHS",
    "fingerprint",
    "inlined",
    "kernel",
    "lazy_kernel",
    "subroutine",
]

_F = TypeVar("_F", bound=Callable[..., Any])

BOOLEAN: Final = types.boolean
INT: Final = types.int64
NATURAL: Final = types.uint64

# Columns that are read. They are declared read-only so that Arrow's buffers, which are, can be
# given without a copy; a writable array may be given too.
OCTETS: Final = types.Array(types.uint8, 1, "C", readonly=True)
INTS: Final = types.Array(types.int64, 1, "C", readonly=True)
NATURALS: Final = types.Array(types.uint64, 1, "C", readonly=True)
TRUTHS: Final = types.Array(types.boolean, 1, "C", readonly=True)

# Columns that are written, and a table of several.
OUT_OCTETS: Final = types.uint8[::1]
OUT_INTS: Final = types.int64[::1]
OUT_NATURALS: Final = types.uint64[::1]
OUT_TRUTHS: Final = types.boolean[::1]
OUT_TABLE: Final = types.int64[:, ::1]


# ------------------------------------------------------------------------------------- decorators


_UNWRAPPED: Final[dict[str, Any]] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def kernel(*arguments: Any, returns: Any = types.void) -> Callable[[_F], _F]:
    """Compile on import, for this one signature: a call then never waits for the compiler."""
    signature = returns(*arguments)

    def compile_now(function: _F) -> _F:
        dispatcher = _cached(njit(nogil=True)(function))
        if isinstance(dispatcher, Dispatcher):
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return cast(_F, dispatcher)

    return compile_now


def lazy_kernel(function: _F) -> _F:
    """Compile at the first call with arguments of new types."""
    return cast(_F, _cached(njit(nogil=True)(function)))


def subroutine(function: _F) -> _F:
    """Compile as a part of the kernels that call it.

    Without the wrappers through which Python or C would call it: they take longer to compile than
    most of these functions.
    """
    return cast(_F, njit(**_UNWRAPPED)(function))


def inlined(function: _F) -> _F:
    """Copy into the functions that call it: a call would count references to its arrays."""
    return cast(_F, njit(inline="always", nogil=True)(function))


# ------------------------------------------------------------------------------------------ cache


def fingerprint(function: Callable[..., Any]) -> str:
    """A hash of what a compiled function is made of.

    That is its bytecode, the values of the constants that it refers to, whatever module they come
    from, and the same of all compiled functions that it calls. Names, comments and unrelated code
    of the modules have no part in it. Raises TypeError for a global of which it can't be known
    whether it has changed.
    """
    digest = hashlib.sha256()
    for line in _described(function, set()):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:24]


def _described(value: Any, seen: set[int]) -> Iterator[str]:
    """Lines that change when what is compiled from this value does."""
    if isinstance(value, Dispatcher):
        yield repr(sorted(value.targetoptions.items()))
        value = value.py_func
    if isinstance(value, FunctionType):
        # A function that is called in two ways, or calls itself, is described once.
        if id(value) in seen:
            yield f"again {value.__qualname__}"
            return
        seen.add(id(value))
        yield f"function {value.__defaults__!r}"
        for cell in value.__closure__ or ():
            yield from _described(cell.cell_contents, seen)
        yield from _described_code(value.__code__, value.__globals__, seen)
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype.str} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif isinstance(value, (tuple, list)):
        yield f"{type(value).__name__} of {len(value)}"
        for each in value:
            yield from _described(each, seen)
    elif isinstance(value, (int, float, str, bytes, np.generic, type(None))):
        # Two numbers that are equal need not compile to the same: 1, True and uint8(1).
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, EnumType):
        # numba compiles the values of members in.
        yield f"enumeration {value.__name__}"
        members: Mapping[str, Any] = value.__members__
        for name, member in members.items():
            yield f"member {name}"
            yield from _described(member.value, seen)
    elif isinstance(value, (BuiltinFunctionType, np.ufunc)) or _is_library_type(value):
        yield f"name {getattr(value, '__module__', '')}.{value.__name__}"
    else:
        raise TypeError(f"a kernel refers to {value!r}, which is no constant and not compiled")


def _is_library_type(value: Any) -> bool:
    """Whether it is a type of Python or numpy, such as `int` or `np.uint8`. What a class of our own
    has (the fields of a named tuple, constants) may change while its name stays."""
    return isinstance(value, type) and value.__module__ in ("builtins", "numpy")


def _described_code(code: CodeType, names: dict[str, Any], seen: set[int]) -> Iterator[str]:
    yield f"code {code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _described_code(constant, names, seen)
        else:
            yield f"constant {type(constant).__name__} {constant!r}"
    for name in code.co_names:
        # The others are attributes and builtins.
        value = names.get(name)
        if isinstance(value, ModuleType):
            # Of a module as a global (`layout.HEADER_SIZE`), those attributes that may be meant.
            # numpy is what numba takes it for, whatever its version.
            if value is not np:
                for attribute in code.co_names:
                    if hasattr(value, attribute):
                        yield from _described(getattr(value, attribute), seen)
        elif name in names:
            yield f"global {name}"
            yield from _described(value, seen)


class _FingerprintedFiles(CompileResultCacheImpl):
    """Adds the fingerprint to the names of cache files.

    A file for each fingerprint, rather than one with an entry for each: two processes that write
    different entries of one file at once could exchange their machine code.
    """

    def __init__(self, py_func: Any) -> None:
        self._fingerprint = fingerprint(py_func)
        super().__init__(py_func)  # type: ignore[no-untyped-call]

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        """The file's name without its suffix."""
        base = super().get_filename_base(fullname, abiflags)  # type: ignore[no-untyped-call]
        return f"{base}-{self._fingerprint}"


class _FingerprintedCache(FunctionCache):
    """The machine code of one kernel, by the types of its arguments and the kind of processor."""

    _impl_class = _FingerprintedFiles

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Without numba's hash of what a function encloses: it differs in every process where that
        is a compiled function, and the fingerprint covers it."""
        return sig, codegen.magic_tuple()


class _KernelCache(NullCache):
    """The cache of a kernel, looked for when it is first needed.

    A lazy kernel may call functions that are defined after it, so that its fingerprint can't be
    taken where it is decorated.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def _cache(self) -> Any:
        try:
            return _FingerprintedCache(self._function)  # type: ignore[no-untyped-call]
        except RuntimeError:
            # numba has found no folder that can be written, which is no reason not to work.
            return NullCache()

    @property
    def cache_path(self) -> str | None:
        """The folder; None if there is none."""
        return cast("str | None", self._cache.cache_path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The machine code for these types of arguments, None if there is none."""
        return self._cache.load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep machine code for these types of arguments."""
        self._cache.save_overload(sig, data)

    def flush(self) -> None:
        """Forget what is kept."""
        self._cache.flush()


def _cached(dispatcher: Any) -> Any:
    """numba offers no way to give a function another cache than its own but this attribute."""
    # NUMBA_DISABLE_JIT makes decorators give the function itself.
    if isinstance(dispatcher, Dispatcher):
        setattr(dispatcher, "_cache", _KernelCache(dispatcher.py_func))  # noqa: B010  not in its type
    return dispatcher
