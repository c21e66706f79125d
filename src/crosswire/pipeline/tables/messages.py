"""silver.messages: an application message, assembled from its frames, with its envelope fields.

From frames: `offset` is that of its first frame, `time` that of its last byte; `correlation` is
what a response has in common with its request, `status` the status of a response, `id` the hub's
number where the protocol carries it. From the hub's own `messages`: the envelope, and `intact`: the
payload still has the checksum that was taken at the edge.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.pipeline.decode.meanings.contract import MESSAGE_KINDS
from crosswire.pipeline.decode.row_schema import FRAMES, TABLE
from crosswire.pipeline.tables.frames import with_unmatched

__all__ = ["from_hub", "messages"]

_COLUMNS: Final = (
    "node",
    "connection",
    "direction",
    "offset",
    "id",
    "time",
    "protocol",
    "principal",
    "kind",
    "destination",
    "key",
    "correlation",
    "reply_to",
    "status",
    "sequence",
    "durable",
    "expires",
    "properties",
    "content_type",
    "payload_length",
    "payload",
    "crc",
    "intact",
)


def messages(decoded: DataFrame) -> DataFrame:
    """One row for each message, from decoded rows (`decode.row_schema`).

    A message of several frames is on the row of its last one, with `begun_at` of the first.
    """
    rows = with_unmatched(decoded.where(F.col(TABLE) == FRAMES))
    return rows.where(F.col("kind").isin(*MESSAGE_KINDS)).select(
        "node",
        "connection",
        "direction",
        F.coalesce("begun_at", "offset").alias("offset"),
        F.col("message_id").alias("id"),
        "time",
        "protocol",
        _absent("principal", "string"),
        "kind",
        "destination",
        _absent("key", "string"),
        F.col("identifier").alias("correlation"),
        "reply_to",
        "status",
        "sequence",
        _absent("durable", "boolean"),
        _absent("expires", "bigint"),
        "properties",
        "content_type",
        F.coalesce(F.octet_length("payload"), F.col("payload_length"))
        .cast("bigint")
        .alias("payload_length"),
        "payload",
        F.crc32("payload").alias("crc"),
        _absent("intact", "boolean"),
    )


def from_hub(envelopes: DataFrame) -> DataFrame:
    """The rows of a lake's `messages/` in the same columns."""
    found = {
        "direction": _absent("direction", "string"),
        "offset": _absent("offset", "bigint"),
        "status": _absent("status", "string"),
        # The lake has 0 for messages that never expire.
        "expires": F.nullif("expires", F.lit(0)).alias("expires"),
        "sequence": _absent("sequence", "bigint"),
        "payload_length": F.octet_length("payload").cast("bigint").alias("payload_length"),
        "intact": (F.crc32("payload") == F.col("crc")).alias("intact"),
    }
    return envelopes.select(*(found.get(name, F.col(name)) for name in _COLUMNS))


def _absent(name: str, kind: str) -> Column:
    return F.lit(None).cast(kind).alias(name)
