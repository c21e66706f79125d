"""What benchmarks take from the tests: the plain implementation of decoding, against which the
columnar one is tested and measured, and large inputs. Tests never import from here.

Spark's workers import it too, so their path is extended as well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), ROOT)))

from tests.pipeline.decode.oracle import reading_of  # noqa: E402
from tests.pipeline.decode.oracle.connection_rows import ConnectionRows  # noqa: E402
from tests.pipeline.repeated import (  # noqa: E402
    Counted,
    Repeated,
    long_connections,
    many_connections,
)

__all__ = [
    "ConnectionRows",
    "Counted",
    "Repeated",
    "long_connections",
    "many_connections",
    "reading_of",
]
