"""How what goes over columns is compiled, and what it is given.

Kernels are compiled on import, for one signature, and kept on disk. numba does not notice when a
function in *another* file changes: who edits what kernels of other modules call removes
`__pycache__` here.
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


def kernel(*arguments: Any, returns: Any = types.void) -> Callable[[_F], _F]:
    """For what Python calls; what only kernels call is `wire.bulk.compiled`."""
    signature = returns(*arguments)

    def compiled(function: _F) -> _F:
        return cast(_F, njit([signature], cache=True, nogil=True)(function))

    return compiled
