"""The catalog: every table and every column of it, with type and meaning, stated once.

The runners write tables by it, Parquet files carry its comments, `docs/tables.md` is made of it,
and views for SQL engines too. It imports no Spark: the command line and the report need it.

The functions that make the rows compute with numbers: times are µs since 1970, as in the lake.
`source` is the name of such a column where the table has another one. `published` converts.

    python -m crosswire.pipeline.tables.catalog > docs/tables.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from crosswire.pipeline.tables.names import ACCOUNT_PARTS, PERCENTILES

__all__ = ["CATALOG", "HISTOGRAM", "TableColumn", "TableEntry", "entry", "markdown"]

TEXT: Final = "string"
NUMBER: Final = "bigint"
SMALL: Final = "int"
FLAG: Final = "boolean"
BYTES: Final = "binary"
TIME: Final = "timestamp"
SHARE: Final = "double"
PROPERTIES: Final = "map<string,string>"
HISTOGRAM: Final = "array<struct<bucket:int,count:bigint>>"


@dataclass(frozen=True)
class TableColumn:
    """A column: its name, its type in Spark's words, and what it means."""

    name: str
    type: str
    comment: str
    source: str = ""

    @property
    def computed_as(self) -> str:
        """The name that it has where the rows are made."""
        return self.source or self.name


@dataclass(frozen=True)
class TableEntry:
    """A table.

    row       what a row is
    dated_by  the source column whose date is the partition; empty if there is none
    has_open  rows that may still change are in the same table of the layer `open`
    adds_up   a row is a sum to which any later batch of a stream may add
    """

    layer: str
    name: str
    row: str
    columns: tuple[TableColumn, ...]
    dated_by: str = ""
    has_open: bool = False
    adds_up: bool = False
    text: str = ""

    @property
    def path(self) -> str:
        """As `gold.traffic`."""
        return f"{self.layer}.{self.name}"

    @property
    def paths(self) -> tuple[str, ...]:
        """This table, and the one of its open rows if there is one."""
        return (self.path, f"open.{self.name}") if self.has_open else (self.path,)


def _column(name: str, kind: str, comment: str, source: str = "") -> TableColumn:
    return TableColumn(name, kind, comment, source)


_NODE: Final = _column(
    "node", TEXT, "The hub's name of its data; `pcap` for what comes from capture files"
)
_CONNECTION: Final = _column(
    "connection",
    TEXT,
    "Name of the connection on its node; of a captured one `client:port-server:port@start`",
)
_DIRECTION: Final = _column(
    "direction",
    TEXT,
    "`forward`: sent by the side that opened the connection; `backward`: by the other one",
)
_PROTOCOL: Final = _column(
    "protocol", TEXT, "emp, emqp, relink, epoxy, micromsg2, or tls; null if it is not known"
)
_LISTENER: Final = _column("listener", TEXT, "The hub's listener that accepted the connection")
_DESTINATION: Final = _column(
    "destination", TEXT, "`queue/NAME`, `topic/NAME` or `service/NAME[/METHOD]`"
)
_KIND: Final = _column("kind", TEXT, "send, publish, request or response")
_CORRELATION: Final = _column(
    "correlation", TEXT, "What a response has in common with its request on a connection"
)
_MESSAGE_ID: Final = _column(
    "message_id", NUMBER, "The hub's number of the message on its node", "id"
)
_SUBSCRIPTION: Final = _column(
    "subscription", TEXT, "The named subscription; empty for queues, services and other receivers"
)
_CLIENT: Final = _column("client", TEXT, "Address of the side that opened the connection")
_PRINCIPAL: Final = _column(
    "principal",
    TEXT,
    "The user as whom the connection signed in: the one that the ledger names for it by the minute "
    "after; null if the ledger names none",
)
_REVOCABLE: Final = _column(
    "revocable",
    FLAG,
    "True: a later batch of the stream may replace or remove the row. False: it is final",
)
_ADDRESSES: Final = (
    _column("connector_address", TEXT, "Address of the side that opened the connection"),
    _column("connector_port", SMALL, "Its port"),
    _column("acceptor_address", TEXT, "Address of the side that accepted it"),
    _column("acceptor_port", SMALL, "Its port"),
)


def _time(comment: str, source: str = "", name: str = "time") -> TableColumn:
    return TableColumn(name, TIME, comment, source)


def _counts(**comments: str) -> tuple[TableColumn, ...]:
    return tuple(_column(name, NUMBER, comment) for name, comment in comments.items())


_WIRE: Final = TableEntry(
    "bronze",
    "wire",
    "a run of bytes in one direction of a connection",
    (
        _NODE,
        _column("seq", NUMBER, "Order of the rows of a connection, both directions together"),
        _CONNECTION,
        _DIRECTION,
        _column(
            "kind",
            TEXT,
            "`open`, `data`, `gap`, `fin`, `reset`; `lost` for rows that the hub could not keep",
        ),
        _column(
            "byte_offset", NUMBER, "Position of its first byte in the direction, from 0", "offset"
        ),
        _column("length", NUMBER, "Bytes"),
        _time("When it was received; never runs backwards within a direction"),
        _column("data", BYTES, "The bytes; null unless `kind` is `data`"),
        _column("late", FLAG, "The direction's beginning was not captured"),
        _PROTOCOL,
        _LISTENER,
        *_ADDRESSES,
        _REVOCABLE,
    ),
    dated_by="time",
    text="Made of capture files. The lake of a hub has it already, as its `wire/`.",
)

_FRAMES: Final = TableEntry(
    "silver",
    "frames",
    "a frame of any protocol, or bytes that are no frame",
    (
        _NODE,
        _CONNECTION,
        _DIRECTION,
        _column("layer", SMALL, "0, or 1 for a frame inside another one (eMQP's in ZMTP's)"),
        _column("byte_offset", NUMBER, "Position; bytes add up on layer 0", "offset"),
        _column("length", NUMBER, "Bytes"),
        _time("When its last byte was received"),
        _PROTOCOL,
        _column(
            "frame",
            TEXT,
            "The protocol's own name; `gap`, `unsynchronized` and `encrypted` are no frames",
        ),
        _column(
            "identifier",
            TEXT,
            "What ties frames together: a response has its request's. Of Relink's listener-hello "
            "the link (`epoch/link`, hex), of its messages `channel:n`",
        ),
        _column("kind", TEXT, "The same words for all protocols: see the kinds in pipeline.md"),
        _column("destination", TEXT, "As in messages; a response has its request's"),
        _column("status", TEXT, "`success`, or what failed; of an acknowledgement, which one"),
        _column("sequence", NUMBER, "Relink's and MicroMsg2's number of a message"),
        _column("payload_offset", NUMBER, "Position of the payload in the direction"),
        _column("payload_length", NUMBER, "Bytes of the payload"),
        _column("fields", TEXT, "JSON: the frame's other fields, as the protocol names them"),
        _REVOCABLE,
    ),
    dated_by="time",
)

_MESSAGES: Final = TableEntry(
    "silver",
    "messages",
    "an application message, assembled from its frames",
    (
        _NODE,
        _CONNECTION,
        _DIRECTION,
        _column("byte_offset", NUMBER, "Position of its first frame in the direction", "offset"),
        _column(
            "message_id",
            NUMBER,
            "The hub's number of the message, where the protocol carries it",
            "id",
        ),
        _time("When its last byte was received; of the hub's own record: when it was accepted"),
        _PROTOCOL,
        _column("principal", TEXT, "The user who sent it; only from the hub's own record"),
        _KIND,
        _DESTINATION,
        _column("key", TEXT, "The key that the producer gave; only from the hub's own record"),
        _CORRELATION,
        _column("reply_to", TEXT, "Where an answer is to be sent"),
        _column("status", TEXT, "Of a response: `success`, or what failed"),
        _column("sequence", NUMBER, "Relink's and MicroMsg2's number of a message"),
        _column("durable", FLAG, "Had to be durable before it was acknowledged; hub's record only"),
        _time("When it becomes worthless; null if never; hub's record only", name="expires"),
        _column("properties", PROPERTIES, "Headers that all protocols can carry; values as text"),
        _column("content_type", TEXT, "MIME type of the payload"),
        _column("payload_length", NUMBER, "Bytes of the payload"),
        _column("payload", BYTES, "The payload"),
        _column("crc", NUMBER, "CRC-32 of the payload, unsigned"),
        _column(
            "intact",
            FLAG,
            "The payload still has the checksum taken at the edge; only from the hub's record",
        ),
        _REVOCABLE,
    ),
    dated_by="time",
    text="Where the input is a lake without `wire/`, the rows are the hub's own `messages/`.",
)

_VIOLATIONS: Final = TableEntry(
    "silver",
    "violations",
    "bytes that the protocol does not allow",
    (
        _NODE,
        _CONNECTION,
        _DIRECTION,
        _column("layer", SMALL, "0, or 1 inside another frame"),
        _column("byte_offset", NUMBER, "Position in the direction", "offset"),
        _column("length", NUMBER, "Bytes"),
        _time("When they were received"),
        _PROTOCOL,
        _column("error", TEXT, "malformed, unknown, unsupported or limit"),
        _column("reason", TEXT, "Which rule, in words"),
        _REVOCABLE,
    ),
    dated_by="time",
)

_DIRECTIONS: Final = TableEntry(
    "silver",
    "directions",
    "one direction of a connection",
    (
        _NODE,
        _CONNECTION,
        _DIRECTION,
        _PROTOCOL,
        _LISTENER,
        *_ADDRESSES,
        _column("opened", FLAG, "Its opening was captured"),
        _column("late", FLAG, "Its beginning was not captured"),
        _time("Of its first row", "first_time"),
        _time("Of its last row", name="last_time"),
        _column("first_offset", NUMBER, "Position of its first byte"),
        *_counts(
            seen="Bytes, those of gaps included",
            gaps="Bytes that are missing in the capture",
            tail="Bytes of a frame that was incomplete at the end",
            unread="Bytes that can't be decoded after a violation",
        ),
        _column("ended", TEXT, "`fin`, `reset`, or null while it is open"),
        _REVOCABLE,
    ),
)

_SESSIONS: Final = TableEntry(
    "gold",
    "sessions",
    "a connection, or a Relink link over several",
    (
        _NODE,
        _column("session", TEXT, "The connection's name, or the link's: `epoch/link`"),
        _PROTOCOL,
        _LISTENER,
        _column("connections", NUMBER, "How many connections it had"),
        _column("last_connection", TEXT, "The last one of them"),
        *_ADDRESSES,
        _time("When it was opened", "opened"),
        _time("When its last byte was received", "last", "last_time"),
        _column("late", FLAG, "Its beginning was not captured"),
        _column("handshake_us", NUMBER, "From the first to the last frame of the handshake"),
        *_counts(
            frames_forward="Frames that the connecting side sent",
            frames_backward="Frames that the accepting side sent",
            messages_forward="Messages of the connecting side",
            messages_backward="Messages of the accepting side",
            bytes_forward="Bytes of the connecting side",
            bytes_backward="Bytes of the accepting side",
            gap_bytes="Bytes that are missing in the capture",
            violations="Violations of the protocol",
        ),
        _column(
            "ended",
            TEXT,
            "`error` or `goodbye` (a frame of the protocol), `reset` or `fin` (TCP only), `killed`"
            " (it has no end, and its hub was started again since), `open`",
        ),
        _column("error", TEXT, "Status of the error frame that ended it"),
        _REVOCABLE,
    ),
    dated_by="opened",
    has_open=True,
)

_LEG: Final = _column(
    "leg",
    TEXT,
    "A call through the hub has two legs: `caller` (caller to hub) and `provider` (hub to "
    "provider). Count or average one of them",
)

_CONVERSATIONS: Final = TableEntry(
    "gold",
    "conversations",
    "a request with its response",
    (
        _NODE,
        _CONNECTION,
        _CLIENT,
        _PRINCIPAL,
        _PROTOCOL,
        _DESTINATION,
        _LEG,
        _column("direction", TEXT, "Of the request: `forward` or `backward`"),
        _CORRELATION,
        _column("request_offset", NUMBER, "Position of the request in its direction"),
        _column("response_offset", NUMBER, "Position of the response in the other direction"),
        _time("When the request was sent", "asked"),
        _time("When the response was sent; null if there is none", name="answered"),
        _column("latency_us", NUMBER, "From request to response, never negative"),
        _column("request_bytes", NUMBER, "Bytes of the request's payload"),
        _column("response_bytes", NUMBER, "Bytes of the response's payload"),
        _column(
            "outcome",
            TEXT,
            "The response's status, or `unanswered`; null while it may still be answered",
        ),
        _REVOCABLE,
    ),
    dated_by="asked",
    has_open=True,
    text="The n-th request with a correlation goes with the n-th response to it.",
)

_TRAFFIC: Final = TableEntry(
    "gold",
    "traffic",
    "a minute × node × protocol × destination × leg × direction × client × principal",
    (
        _time("Beginning of the minute", "minute"),
        _NODE,
        _PROTOCOL,
        _DESTINATION,
        _column("leg", TEXT, "As in conversations; null for messages that are part of no call"),
        _column("direction", TEXT, "Of the messages: `forward` or `backward`"),
        _CLIENT,
        _PRINCIPAL,
        *_counts(
            messages="Messages of all kinds",
            sends="Of them sends",
            publishes="Of them publishes",
            requests="Of them requests",
            responses="Of them responses",
            bytes="Bytes of their payloads",
            errors="Responses with an error",
        ),
        _column("messages_per_s", SHARE, "Messages, by 60"),
        *(
            _column(
                f"latency_p{round(share * 100)}_us",
                NUMBER,
                f"{share:.0%} of the answered requests of the minute took at most this long",
            )
            for share in PERCENTILES
        ),
        _column("latency_max_us", NUMBER, "The longest of them"),
        _column(
            "histogram",
            HISTOGRAM,
            "Latencies as counts by bucket. Histograms of any rows can be merged: see "
            "latency_percentile",
        ),
        _REVOCABLE,
    ),
    dated_by="minute",
    adds_up=True,
    text=(
        "Latencies are in the row of the requests' minute and direction. A percentile over several "
        "rows is not the mean of theirs: `latency_percentile(array_agg(histogram), 0.99)`."
    ),
)

_TOPOLOGY: Final = TableEntry(
    "gold",
    "topology",
    "an edge between two hosts: who talks to whom",
    (
        _column("source", TEXT, "Who sent the messages"),
        _column("target", TEXT, "Who received them; the accepting side is shown with its port"),
        _PROTOCOL,
        _KIND,
        _DESTINATION,
        *_counts(messages="Messages", bytes="Bytes of their payloads", connections="Connections"),
        _time("Of the first message", "first", "first_time"),
        _time("Of the last message", "last", "last_time"),
        _REVOCABLE,
    ),
    adds_up=True,
)

_DELIVERIES: Final = TableEntry(
    "gold",
    "deliveries",
    "a message and a hop",
    (
        _NODE,
        _column(
            "message_id",
            NUMBER,
            "The hub's number of the message; null in a row for a missing range of the ledger",
            "id",
        ),
        _column("origin", NUMBER, "Of a dead letter or a replay: the message that it is a copy of"),
        _KIND,
        _DESTINATION,
        _column("producer_protocol", TEXT, "Protocol of the connection that it came from"),
        _column("producer", TEXT, "The connection that it came from"),
        _column(
            "hop",
            TEXT,
            "An exit of the hub: a queue, a service, a named subscription (`@NAME`), or a topic's "
            "receiver; null while there is none",
        ),
        _column("protocol", TEXT, "Protocol of the connection that it was last delivered to"),
        _column("connection", TEXT, "The connection that it was last delivered to"),
        _time("When its bytes were received, where the producer was tapped", name="sent"),
        _time("When the hub accepted it", "accepted"),
        _time("When it was first delivered", name="delivered"),
        _time("When it was settled or answered", name="settled"),
        _time("When it ended in any way", name="ended"),
        *_counts(
            attempts="Deliveries",
            refusals="How often the receiver refused it",
            returns="How often it came back without a refusal",
        ),
        _column(
            "outcome",
            TEXT,
            "settled, answered, delivered (nothing is settled there), dead, expired, dropped, "
            "damaged, failed, replayed; of a topic's receiver that another one followed returned, "
            "refused; unclaimed (a topic without subscribers); waiting and held are open; unknown",
        ),
        _column("detail", TEXT, "Why, as the hub recorded it"),
        _column("latency_us", NUMBER, "From accepted to settled or answered, or to delivered"),
        _column("late", FLAG, "It took longer than `--late`, or is open for longer"),
        _column("lost", FLAG, "It was never received, and nobody intended that"),
        _column("doubled", FLAG, "It may have been processed twice"),
        _column("reason", TEXT, "Why the row is uncertain; null if it is certain"),
        _column("on_wire", NUMBER, "Deliveries that the tap shows"),
        _column("same_payload", FLAG, "The wire carried the bytes that the hub keeps"),
        _column("intact", FLAG, "The payload in the lake still has its checksum"),
        _REVOCABLE,
    ),
    dated_by="accepted",
    has_open=True,
)

_RECONCILIATION: Final = TableEntry(
    "gold",
    "reconciliation",
    "one passage of a message over a tapped connection: wire against ledger",
    (
        _NODE,
        _CONNECTION,
        _PROTOCOL,
        _DESTINATION,
        _KIND,
        _column("way", TEXT, "`in` (to the hub), `out` (a delivery) or `answer` (to the caller)"),
        _MESSAGE_ID,
        _column("attempt", SMALL, "Of a delivery: which one, from 1"),
        _SUBSCRIPTION,
        _column(
            "verdict",
            TEXT,
            "equal, missing on the wire, missing in the ledger, not accepted, withdrawn, uncertain",
        ),
        _column("reason", TEXT, "Why it is uncertain"),
        _time("On the wire, else in the ledger"),
        _time("On the wire", name="wire_time"),
        _time("In the ledger", name="ledger_time"),
        _column("byte_offset", NUMBER, "Position in its direction", "offset"),
        _column("ledger_seq", NUMBER, "Number of its row in the ledger"),
        _column("acknowledged", FLAG, "By the hub, on the wire; null where the protocol is silent"),
        _column("same_payload", FLAG, "The wire carried the bytes that the hub keeps"),
        _column("intact", FLAG, "The payload in the lake still has its checksum"),
        _REVOCABLE,
    ),
    dated_by="time",
)

_STEPS: Final = TableEntry(
    "gold",
    "steps",
    "a step in a message's life, as the hub recorded it",
    (
        _NODE,
        _MESSAGE_ID,
        _column("ledger_seq", NUMBER, "Number of the row in the node's ledger: the order", "seq"),
        _time("When it was done"),
        _column(
            "step",
            TEXT,
            "accepted, delivered, settled, refused, returned, expired, dead, answered, failed, "
            "dropped, damaged, replayed",
        ),
        _DESTINATION,
        _column("kind", TEXT, "Of the message: send, publish, request or response"),
        _column("protocol", TEXT, "Of the connection of the step; empty if it has none"),
        _column("connection", TEXT, "Who produced, got or settled it; empty if nobody did"),
        _column("client", TEXT, "Address of that connection, where it was tapped"),
        _column("principal", TEXT, "The user as whom that connection signed in; empty if none"),
        _SUBSCRIPTION,
        _column("attempt", SMALL, "Which delivery it is about, from 1; 0 if about none"),
        _column("detail", TEXT, "Why, in words; empty if there is no reason"),
        _column("count", NUMBER, "Above 1 where the row stands for several deliveries"),
        _column("since_accepted_us", NUMBER, "From the message's acceptance to this step"),
        _column("origin", NUMBER, "Of a dead letter or a replay: the message that it is a copy of"),
        _REVOCABLE,
    ),
    dated_by="time",
    text="One message's life: `WHERE node = … AND message_id = … ORDER BY ledger_seq`.",
)

_DEPTH: Final = TableEntry(
    "gold",
    "depth",
    "a minute × queue",
    (
        _time("Beginning of the minute", "minute"),
        _NODE,
        _DESTINATION,
        *_counts(
            accepted="Messages that came in the minute",
            delivered="Deliveries in the minute",
            settled="Messages that were settled in the minute",
            refused="Messages that were refused in the minute",
            gone="Messages that left in any way: settled, dead, expired, dropped, replayed",
            depth="Messages at the end of the minute, those that consumers hold included",
        ),
        _REVOCABLE,
    ),
    dated_by="minute",
    adds_up=True,
    text=(
        "Only messages whose acceptance is in the ledger are counted. A minute in which nothing "
        "happened to a queue has no row: its depth is that of the row before."
    ),
)

_LAG: Final = TableEntry(
    "gold",
    "lag",
    "a minute × named subscription",
    (
        _time("Beginning of the minute", "minute"),
        _NODE,
        _column("subscription", TEXT, "Its name; with users `PRINCIPAL.NAME`"),
        *_counts(
            accepted="Messages that its topics accepted in the minute",
            delivered="Deliveries to it in the minute",
            settled="Messages that it settled in the minute",
            refused="Messages that it refused in the minute",
            position="message_id of the newest message that it was given so far",
            newest="message_id of the newest message of its topics",
            lag_us="Time between these two when they were accepted; 0 if it has the newest",
        ),
        _REVOCABLE,
    ),
    dated_by="minute",
    adds_up=True,
    text=(
        "The topics of a subscription are those of which it was given messages: the ledger does "
        "not record filters. There is a row for each minute, from its first delivery on, in which "
        "it was given something or its topics accepted something."
    ),
)

_PARTS_OF_ACCOUNTING: Final = {
    "frames": "Bytes of frames",
    "unsynchronized": "Bytes skipped until a frame was found",
    "violations": "Bytes that the protocol does not allow",
    "gaps": "Bytes that are missing in the capture",
    "encrypted": "Bytes of TLS or CURVE",
    "tail": "Bytes of a frame that was incomplete at the end",
    "unread": "Bytes that can't be decoded after a violation",
    "unknown": "Bytes of connections whose protocol is not known",
}

_ACCOUNTING: Final = TableEntry(
    "gold",
    "accounting",
    "a direction of a connection: the category of every byte; or a category of packets",
    (
        _NODE,
        _CONNECTION,
        _DIRECTION,
        _PROTOCOL,
        _column("seen", NUMBER, "Bytes, those of gaps included: the sum of the next columns"),
        *_counts(**{name: _PARTS_OF_ACCOUNTING[name] for name in ACCOUNT_PARTS}),
        _column("missing", NUMBER, "Difference of `seen` and the sum: always 0, or the run fails"),
        _column(
            "category",
            TEXT,
            "`refused connection`; in rows without a connection: what became of packets, and why",
        ),
        _column("packets", NUMBER, "Packets of captures in this category; null for a direction"),
        _column("bytes", NUMBER, "Captured bytes of these packets; null for a direction"),
        _REVOCABLE,
    ),
)

CATALOG: Final = {
    each.name: each
    for each in (
        _WIRE,
        _FRAMES,
        _MESSAGES,
        _VIOLATIONS,
        _DIRECTIONS,
        _SESSIONS,
        _CONVERSATIONS,
        _TRAFFIC,
        _TOPOLOGY,
        _DELIVERIES,
        _RECONCILIATION,
        _STEPS,
        _DEPTH,
        _LAG,
        _ACCOUNTING,
    )
}
"""The tables by name, in the order in which they are shown."""


def entry(path: str) -> TableEntry:
    """The table of a path: `gold.traffic`; `open.sessions` has the columns of `gold.sessions`."""
    return CATALOG[path.rpartition(".")[2]]


_HEAD: Final = """\
# Tables

Made by `python -m crosswire.pipeline.tables.catalog`: edit that module, not this page.

Tables are Parquet files; `crosswire pipeline views` and `crosswire.pipeline.open_tables` find them:
[where they are](pipeline.md#where-the-tables-are). Times are TIMESTAMP, UTC, with microseconds;
durations are BIGINT and end in `_us`. A table that is partitioned has a column `date` too, the date
of `time`: a condition on it spares reading the other days. A table without rows has its columns all
the same. `revocable` is false for all rows of a batch but those in `open`; in a stream it marks
what may still change.

[Questions](questions.md) has examples, [the pipeline](pipeline.md) how the tables are made.
"""


def markdown() -> str:
    """The page of all tables."""
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    for table in CATALOG.values():
        yield f"## {table.path} — {table.row}\n"
        if table.text:
            yield f"{table.text}\n"
        if table.dated_by:
            yield "Partitioned by `date`.\n"
        if table.has_open:
            yield f"Rows that may still change are in `open.{table.name}`.\n"
        yield "| column | type | |\n|---|---|---|"
        for column in table.columns:
            yield f"| {column.name} | {column.type.upper()} | {column.comment} |"
        yield ""


if __name__ == "__main__":
    sys.stdout.write(markdown())
