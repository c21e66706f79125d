"""Tables made by hand: messages on connections, and what a hub recorded of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from zlib import crc32

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from crosswire.lake.schemas import LEDGER, MESSAGES

MESSAGE_COLUMNS: Final = (
    "node string, connection string, direction string, protocol string, offset bigint, "
    "time bigint, id bigint, kind string, destination string, correlation string, "
    "status string, sequence bigint, crc bigint"
)
FRAME_COLUMNS: Final = (
    "node string, connection string, direction string, protocol string, time bigint, "
    "identifier string, kind string, status string, sequence bigint"
)
DIRECTION_COLUMNS: Final = (
    "node string, connection string, direction string, late boolean, gaps bigint, "
    "unread bigint, last_time bigint, ended string"
)


class Records:
    """Every call is later than the one before, by a millisecond by default."""

    def __init__(self, start: int = 1_000_000) -> None:
        self.now = start
        self.connections: list[str] = []
        self._connection = self._protocol = ""
        self._messages: list[tuple[Any, ...]] = []
        self._frames: list[tuple[Any, ...]] = []
        self._directions: list[tuple[Any, ...]] = []
        self._ledger: list[dict[str, Any]] = []
        self._envelopes: list[dict[str, Any]] = []

    @staticmethod
    def crc_of(payload: bytes) -> int:
        return crc32(payload)

    @contextmanager
    def on(
        self,
        connection: str,
        protocol: str,
        *,
        gaps: int = 0,
        ended: str | None = "fin",
        link: str = "",
    ) -> Iterator[None]:
        """What is called meanwhile is of this connection, which may belong to a Relink link."""
        self._connection, self._protocol = connection, protocol
        self.connections.append(connection)
        if link:
            hello = (self._tick(), link, "handshake", None, None)
            self._frames.append(("n", connection, "backward", protocol, *hello))
        yield
        for direction in ("forward", "backward"):
            self._directions.append(("n", connection, direction, False, gaps, 0, self.now, ended))

    def _tick(self, after_us: int = 1000) -> int:
        self.now += after_us
        return self.now

    def sent(
        self,
        payload: bytes,
        *,
        out: bool = False,
        kind: str = "send",
        destination: str = "queue/q",
        identifier: str | None = None,
        status: str | None = None,
        message_id: int | None = None,
        sequence: int | None = 0,
    ) -> None:
        """A message; with a status, the hub's answer to it too."""
        now, name = self._tick(), self._connection
        way, back = ("backward", "forward") if out else ("forward", "backward")
        index = (now, now, message_id, kind, destination)
        own = (identifier, None, sequence, crc32(payload))
        self._messages.append(("n", name, way, self._protocol, *index, *own))
        if status is not None:
            answer = (self._tick(), identifier, "acknowledgement", status, None)
            self._frames.append(("n", name, back, self._protocol, *answer))
        elif self._protocol == "relink" and sequence is not None:
            answer = (self._tick(), "0", "acknowledgement", "consumed", sequence)
            self._frames.append(("n", name, back, self._protocol, *answer))

    def answered(self, status: str, *, destination: str, identifier: str) -> None:
        """The hub's response to a request."""
        now, name, protocol = self._tick(), self._connection, self._protocol
        own = (identifier, status, None, crc32(b""))
        index = (now, now, None, "response", destination)
        self._messages.append(("n", name, "backward", protocol, *index, *own))
        frame = (now, identifier, "response", status, None)
        self._frames.append(("n", name, "backward", protocol, *frame))

    def error(self) -> None:
        frame = (self._tick(), None, "error", "refused", None)
        self._frames.append(("n", self._connection, "backward", self._protocol, *frame))

    def recorded(
        self,
        step: str,
        *,
        identifier: int | None = None,
        payload: bytes = b"",
        destination: str = "queue/q",
        kind: str = "send",
        connection: str | None = None,
        attempt: int = 0,
        detail: str = "",
        count: int = 1,
        subscription: str = "",
        kept: bool = True,
        crc: int | None = None,
        native: Mapping[str, bytes] | None = None,
        after_us: int = 1000,
    ) -> int:
        """A row of the ledger; without an identifier it is of a new message, which is given.

        What a hub moves has the time of the step that moved it.
        """
        moves = self._ledger and self._ledger[-1]["step"] in ("dead", "replayed")
        now = self.now if moves and step == "accepted" else self._tick(after_us)
        if identifier is None:
            identifier = len(self._ledger) + 100
            if kept:
                self._keep(identifier, now, destination, kind, payload, crc, native or {})
        self._ledger.append(
            {
                "node": "n",
                "seq": len(self._ledger) + 1,
                "id": identifier,
                "time": now,
                "step": step,
                "destination": destination,
                "protocol": self._protocol,
                "connection": self._connection if connection is None else connection,
                "principal": "",
                "attempt": attempt,
                "detail": detail,
                "count": count,
                "subscription": subscription,
            }
        )
        return identifier

    def _keep(
        self,
        number: int,
        time: int,
        destination: str,
        kind: str,
        payload: bytes,
        crc: int | None,
        native: Mapping[str, bytes],
    ) -> None:
        self._envelopes.append(
            dict.fromkeys(MESSAGES.names, "")
            | {
                "node": "n",
                "seq": number,
                "id": number,
                "time": time,
                "kind": kind,
                "destination": destination,
                "durable": True,
                "expires": 0,
                "native": dict(native),
                "payload": payload,
                "crc": crc32(payload) if crc is None else crc,
            }
        )

    def end(self, after_us: int = 1_000_000) -> None:
        """Both sides go on a little, so that all before is certain."""
        with self.on("the end", "emp"):
            self.recorded("settled", identifier=1, after_us=after_us)

    def tables(
        self, spark: SparkSession
    ) -> tuple[DataFrame, DataFrame, DataFrame, DataFrame, DataFrame]:
        """messages, frames and directions of the wire; ledger and messages of the hub."""
        return (
            spark.createDataFrame(self._messages, MESSAGE_COLUMNS),
            spark.createDataFrame(self._frames, FRAME_COLUMNS),
            spark.createDataFrame(self._directions, DIRECTION_COLUMNS),
            *self.records(spark),
        )

    def rows(self) -> tuple[pa.Table, pa.Table]:
        """ledger and messages of the hub, without Spark."""
        ledger = pa.Table.from_pylist(self._ledger, schema=LEDGER)
        return ledger, pa.Table.from_pylist(self._envelopes, schema=MESSAGES)

    def records(self, spark: SparkSession) -> tuple[DataFrame, DataFrame]:
        made = []
        for rows, schema in ((self._ledger, LEDGER), (self._envelopes, MESSAGES)):
            columns = from_arrow_schema(schema)
            values = [tuple(row[name] for name in schema.names) for row in rows]
            made.append(spark.createDataFrame(values, columns))
        return made[0], made[1]
