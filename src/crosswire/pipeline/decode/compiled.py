"""Functions that numba compiles, and what they are given.

numba has no types of its own for a checker: they are said here, once. What is compiled is kept on
disk; numba does not notice when a function in *another* file changes: who edits what kernels of
other modules call removes `__pycache__` there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from numba import njit, types

__all__ = [
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
    "compiled",
    "inlined",
    "kernel",
]

_F = TypeVar("_F", bound=Callable[..., Any])

INT: Final = types.int64
NATURAL: Final = types.uint64

# Columns that are read; any array may be given for them.
OCTETS: Final = types.Array(types.uint8, 1, "C", readonly=True)
INTS: Final = types.Array(types.int64, 1, "C", readonly=True)
NATURALS: Final = types.Array(types.uint64, 1, "C", readonly=True)
TRUTHS: Final = types.Array(types.boolean, 1, "C", readonly=True)

# Columns that are written, and several of them together.
OUT_OCTETS: Final = types.uint8[::1]
OUT_INTS: Final = types.int64[::1]
OUT_NATURALS: Final = types.uint64[::1]
OUT_TRUTHS: Final = types.boolean[::1]
OUT_TABLE: Final = types.int64[:, ::1]


def compiled(function: _F) -> _F:
    """Compile at the first call, and keep the result on disk for the next process."""
    return cast(_F, njit(cache=True, nogil=True)(function))


def inlined(function: _F) -> _F:
    """Compiled as a part of whoever calls it: a call would count references to its arrays."""
    return cast(_F, njit(inline="always", nogil=True)(function))


def kernel(*arguments: Any, returns: Any = types.void) -> Callable[[_F], _F]:
    """Compiled on import, for one signature; what only kernels call is `wire.bulk.compiled`."""
    signature = returns(*arguments)

    def kept(function: _F) -> _F:
        return cast(_F, njit([signature], cache=True, nogil=True)(function))

    return kept
