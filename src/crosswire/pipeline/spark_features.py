"""What newer versions of Spark have for Python data sources, with stand-ins for older ones.

Spark 4.0 has sources and streams; it pushes no filters down, asks a stream for its latest offset
without a start or a limit, and gives writers of streams rows instead of Arrow batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import datasource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceStreamArrowWriter,
        EqualTo,
        Filter,
        GreaterThan,
        GreaterThanOrEqual,
        In,
        LessThan,
        LessThanOrEqual,
    )
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )

    HAS_LIMITS: bool
    HAS_STREAM_BATCHES: bool
else:

    def _stand_in(name: str) -> type:
        """A class that nothing is an instance of."""
        return type(name, (), {})

    for _name in (
        *("EqualTo", "Filter", "GreaterThan", "GreaterThanOrEqual", "In"),
        *("LessThan", "LessThanOrEqual"),
    ):
        globals()[_name] = getattr(datasource, _name, None) or _stand_in(_name)
    HAS_STREAM_BATCHES = hasattr(datasource, "DataSourceStreamArrowWriter")
    DataSourceStreamArrowWriter = (
        datasource.DataSourceStreamArrowWriter
        if HAS_STREAM_BATCHES
        else datasource.DataSourceStreamWriter
    )
    try:
        from pyspark.sql.streaming.datasource import (
            ReadAllAvailable,
            ReadLimit,
            ReadMaxBytes,
            ReadMaxRows,
            SupportsTriggerAvailableNow,
        )

        HAS_LIMITS = True
    except ImportError:
        HAS_LIMITS = False
        ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, SupportsTriggerAvailableNow = map(
            _stand_in,
            (
                *("ReadAllAvailable", "ReadLimit", "ReadMaxBytes", "ReadMaxRows"),
                "SupportsTriggerAvailableNow",
            ),
        )

__all__ = [
    "HAS_LIMITS",
    "HAS_STREAM_BATCHES",
    "DataSourceStreamArrowWriter",
    "EqualTo",
    "Filter",
    "GreaterThan",
    "GreaterThanOrEqual",
    "In",
    "LessThan",
    "LessThanOrEqual",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
]
