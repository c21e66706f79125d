"""silver.frames: a frame of any protocol, or bytes that are none.

`frame` is the protocol's name for it; `gap` (missing), `unsynchronized` (seen before a frame's
start was found) and `encrypted` stand for bytes that are no frame. `kind` says in words that all
protocols share what it is about: send, publish, request, response, acknowledgement, subscription,
handshake, heartbeat, goodbye, error, control. `fields` is JSON without the payload, which stands
at `payload_offset` of the direction. Bytes add up on layer 0.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.tables.decoded import FRAME_COLUMNS, FRAMES, TABLE

__all__ = ["frames"]


def frames(decoded: DataFrame) -> DataFrame:
    return decoded.where(F.col(TABLE) == FRAMES).select(*FRAME_COLUMNS)
