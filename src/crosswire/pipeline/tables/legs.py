"""The two legs of a call through a hub, and the client at the other end of a connection.

A call passes the hub twice: from the caller to the hub, and from the hub to the provider. Both are
on a wire, with a request and a response each, so both are rows: `leg` distinguishes them. The hub
accepts the connections of callers and providers alike, so who opened the connection asks on the leg
`caller` and is asked on the leg `provider`. That also holds for a service that is called without a
hub: there is a leg `caller` only.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from crosswire.lake.schemas import FORWARD
from crosswire.pipeline.decode.meanings.contract import REQUEST, RESPONSE
from crosswire.pipeline.tables.names import CALLER, PROVIDER

__all__ = ["clients", "leg_of_message", "leg_of_request"]


def leg_of_request(direction: Column) -> Column:
    """The leg of a call, by the direction of its request."""
    return F.when(direction == FORWARD, CALLER).otherwise(PROVIDER)


def leg_of_message() -> Column:
    """The leg of a request or a response; null for messages that are part of no call."""
    kind, forward = F.col("kind"), F.col("direction") == FORWARD
    return (
        F.when(kind == REQUEST, F.when(forward, CALLER).otherwise(PROVIDER))
        .when(kind == RESPONSE, F.when(forward, PROVIDER).otherwise(CALLER))
        .otherwise(F.lit(None).cast("string"))
    )


def clients(directions: DataFrame) -> DataFrame:
    """By connection: the address of the side that opened it."""
    # Both directions of a connection have the same addresses: any of them will do.
    return directions.groupBy("node", "connection").agg(F.max("connector_address").alias("client"))
