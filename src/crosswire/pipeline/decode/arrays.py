"""Types of the numpy arrays that decoding works on, and the number that stands for "absent"."""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["NONE", "Bytes", "Flags", "Naturals", "Numbers"]

Bytes: TypeAlias = NDArray[np.uint8]
Numbers: TypeAlias = NDArray[np.int64]
Naturals: TypeAlias = NDArray[np.uint64]
Flags: TypeAlias = NDArray[np.bool_]

NONE: Final = -1
"""An absent code, index, length or value in a column of numbers, none of which is negative.

As an index it is the last element: `text.by_code` relies on it.
"""
