"""silver.frames: a frame of any protocol, or bytes that are no frame.

`frame` is the protocol's name for it, or `gap` (missing bytes), `unsynchronized` (skipped before
the start of a frame was found) or `encrypted`. `kind` is the same for all protocols: send, publish,
request, response, unmatched (an answer whose request was not captured), acknowledgement,
subscription, handshake, heartbeat, goodbye, error, control.
`fields` is JSON without the payload, which is at `payload_offset` of the direction. Bytes add up on
layer 0; layer 1 has the frames inside those of layer 0 (eMQP in ZMTP).
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.decode.meanings.contract import RESPONSE
from crosswire.pipeline.decode.row_schema import FRAME_COLUMNS, FRAMES, TABLE
from crosswire.pipeline.tables.names import UNMATCHED

__all__ = ["frames", "with_unmatched"]


def frames(decoded: DataFrame) -> DataFrame:
    """One row for each frame, from decoded rows (`decode.row_schema`)."""
    return with_unmatched(decoded.where(F.col(TABLE) == FRAMES)).select(*FRAME_COLUMNS)


def with_unmatched(frames: DataFrame) -> DataFrame:
    """Frames with the kind `unmatched` for answers whose request was not captured.

    A response has the destination of its request. Without it nobody knows whether the frame answers
    a call or confirms a message, so that it must not be counted as a message.
    """
    is_unmatched = (F.col("kind") == RESPONSE) & F.col("destination").isNull()
    kind = F.when(is_unmatched, UNMATCHED).otherwise(F.col("kind"))
    return frames.withColumn("kind", kind)
