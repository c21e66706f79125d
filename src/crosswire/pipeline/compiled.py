"""Functions that numba compiles: typed here once, since numba has no types of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

__all__ = ["compiled", "inlined"]

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F) -> _F:
    """Compile at the first call, and keep the result on disk for the next process."""
    return cast(_F, njit(cache=True, nogil=True)(function))


def inlined(function: _F) -> _F:
    """Compiled as a part of whoever calls it: a call would count references to its arrays."""
    return cast(_F, njit(inline="always", nogil=True)(function))
