"""docs/security.md: the limits that its tables name are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from crosswire import config, envelope, logs
from crosswire.bond.datatypes import DecodeLimits
from crosswire.bond.schema import MAX_LEVELS
from crosswire.gateways import context, gateway, sign_ins, slots
from crosswire.gateways.emp import messages as emp_messages
from crosswire.gateways.epoxy import messages as epoxy_messages
from crosswire.hub import (
    cron,
    filters,
    policies,
    schedules,
    subscriptions,
    topic_index,
    topic_reads,
    turns,
)
from crosswire.hub.backlog import retries
from crosswire.hub.ingest import staging
from crosswire.server import log_slots, tls_acceptor
from crosswire.store.engine import StoreLimits
from crosswire.web import (
    body_slots,
    dead_selection,
    frames,
    held_analyses,
    listener,
    messages,
    stream_slots,
)
from crosswire.web.contract import SMALL_BODY_BYTES
from crosswire.wire.emp.frames import EmpLimits
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.epoxy import comm
from crosswire.wire.epoxy.frames import EpoxyLimits
from crosswire.wire.micromsg2.frames import MicroMsg2Limits
from crosswire.wire.relink.frames import RelinkLimits

PAGE = (Path(__file__).parents[1] / "docs/security.md").read_text()
FLAT = " ".join(PAGE.split())

Number = int | float


def shown(value: Number, unit: str) -> str:
    """A number as the page writes it."""
    if unit == "bytes of memory":
        for name, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value >= size and value % size == 0:
                return f"{value // size:,} {name}"
    text = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    return f"{text} {unit}".strip()


def size(value: int) -> str:
    return shown(value, "bytes of memory")


def seconds(value: float) -> str:
    return shown(value, "s")


def row(what: str) -> str:
    """The first row of a table that begins with this."""
    found = re.search(rf"^\| {re.escape(what)} \|.*$", PAGE, re.MULTILINE)
    assert found is not None
    return found[0]


EMP, EMQP, EPOXY = EmpLimits(), EmqpLimits(), EpoxyLimits()
MICROMSG2, RELINK = MicroMsg2Limits(), RelinkLimits()
CONNECTIONS, HTTP = config.ConnectionLimits(), config.HttpSettings()
LIMITS = config.ProtocolLimits()

ROWS = [
    ("name of a new destination", [f"{envelope.NAME_BYTES} bytes"]),
    ("name of an existing destination", [f"{envelope.NAMED_CHARACTERS:,} characters"]),
    ("properties of a message", [f"{envelope.PROPERTIES:,}"]),
    ("their size, names and texts", [size(envelope.PROPERTIES_BYTES)]),
    ("terms of a filter", [str(filters.MOST_TERMS)]),
    ("name of a named subscription", [f"{subscriptions._NAME_BYTES} bytes"]),
    ("id of a schedule", [f"{schedules._ID_CHARACTERS} characters"]),
    ("cron expression", [f"{cron._CRON_BYTES} bytes"]),
    ("interval of a schedule", [f"{schedules._LEAST_INTERVAL_S:g} s", "10 years"]),
    ("subscriptions, and services, of a connection", [f"{CONNECTIONS.subscriptions:,}"]),
    ("queues, topics and services", [f"{StoreLimits().destinations:,}"]),
    ("named subscriptions", [f"{LIMITS.subscriptions:,}"]),
    (
        "topics of a pattern that is read",
        [
            f"{topic_reads._AT_ONCE} names",
            f"up to {topic_index.FEW} topics",
            f"{topic_index._CACHED_PATTERNS:,} patterns",
        ],
    ),
    ("who gets what is published to a topic", [f"{subscriptions._AUDIENCE_ENTRIES:,}"]),
    ("schedules", [f"{LIMITS.schedules:,}"]),
    ("calls that wait for a busy provider", [f"{policies.ServicePolicy().waiting:,}"]),
    ("bytes of calls in progress", [size(context._LEAST_SHARE_BYTES)]),
    ("staged batches", [f"{staging._NAMES:,} destinations", f"{staging.PART_NAMES:,}"]),
    (
        "connections",
        [f"{CONNECTIONS.connections:,}", f"{CONNECTIONS.connections_per_address:,} from one"],
    ),
    (
        "live streams over HTTP: tails, events, frames",
        [f"| {stream_slots._STREAMS} | {stream_slots._STREAMS_EACH} |"],
    ),
    ("connections that have not identified themselves", [f"for {slots.IDENTIFY_S:g} s each"]),
    ("HTTP connections", [f"{HTTP.connections:,}"]),
    (
        "HTTP bodies above 64 KiB that are being processed",
        [f"| {body_slots._SLOTS} |", f"{body_slots._WAIT_S:g} s", size(body_slots.LARGE_BYTES)],
    ),
    (
        "captures that are [analyzed](analyzer.md)",
        [f"| {held_analyses._MOST}, ", size(HTTP.capture_bytes), f"| {held_analyses._MOST_EACH}, "],
    ),
    ("warnings about peers in the log", [f"{logs._BURST} at once", f"{logs._RATE:g} a second"]),
    ("a message", [size(EMP.frame_bytes)]),
    ("properties in JSON", [size(envelope.PROPERTIES_BYTES)]),
    ("names in one `$serve`", [f"{emp_messages.SERVED_AT_ONCE:,}"]),
    ("requests without an answer", [f"{EMP.pending_requests:,}", size(EMP.pending_bytes)]),
    ("a message with all its parts", [size(EMQP.frame_bytes), f"{EMQP.parts:,}"]),
    ("headers", [size(EMQP.header_bytes), f"{EMQP.headers:,} entries"]),
    ("queue, topic and msgid", [f"{EMQP.name_bytes:,} each"]),
    ("a command of ZMTP", [size(EMQP.command_bytes)]),
    ("subscriptions of a SUB socket", [size(EMQP.subscription_bytes)]),
    ("a frame", [f"`framelets`, {EPOXY.framelets}", size(EPOXY.frame_bytes)]),
    ("error data of a provider", [size(comm._MAX_ERROR_BYTES)]),
    ("names in one `Serve`", [f"{epoxy_messages.SERVED_AT_ONCE:,}"]),
    (
        "a request of `crosswire.Hub`",
        [
            f"{epoxy_messages.REQUEST_LIMITS.values:,} values",
            f"{epoxy_messages._SETTLED_AT_ONCE:,} ids",
        ],
    ),
    (
        "any other Bond struct that is read by a schema",
        [f"{DecodeLimits().values:,} values", f"{MAX_LEVELS} levels"],
    ),
    ("a frame's payload", [size(MICROMSG2.frame_bytes)]),
    ("a message, joined", [size(MICROMSG2.message_bytes)]),
    ("properties of a client's message", [f"{MICROMSG2.properties:,}"]),
    ("the name of a .NET type", [size(MICROMSG2.type_bytes)]),
    ("a packet", [size(RELINK.frame_bytes), f"{RELINK.parts:,} each"]),
    (
        "messages that are not consumed",
        [f"`window`, {RELINK.window:,}", size(RELINK.unconsumed_bytes)],
    ),
    ("channels", [f"{RELINK.channels:,}"]),
    (
        "the head of a request",
        [
            size(listener._HEAD_BYTES),
            f"{listener._HEAD_LINES} lines",
            seconds(listener._HEAD_S),
        ],
    ),
    (
        "its body, where messages are in it",
        [size(HTTP.body_bytes), seconds(listener._REQUEST_S)],
    ),
    ("a capture", [size(HTTP.capture_bytes)]),
    ("any other JSON body", [size(SMALL_BODY_BYTES)]),
    (
        "messages in one request; ids of those that are to be replayed, moved or deleted",
        [f"{messages._MOST_MESSAGES:,}", f"{dead_selection._MOST_IDS:,}"],
    ),
    ("a response that the client does not read", [seconds(listener._STALL_S)]),
    (
        "reads of the log at once: streams, plans, searches, traces",
        [f"| {log_slots._READERS} |", f"wait {log_slots._WAIT_S:g} s"],
    ),
    ("streams of the log at once, of a user", [f"| {log_slots._STREAMS_EACH} |"]),
    ("plans, searches and traces at once, of a user", [f"| {log_slots._SEARCHES_EACH} |"]),
    (
        "messages that are shown with a queue, a topic or dead letters",
        [size(dead_selection._PAGE_BYTES)],
    ),
    ("frames that are shown live", [f"{size(frames._BYTES_PER_S)} a second"]),
    ("a part of an Arrow batch", [size(policies.StagingLimits().part_bytes)]),
]


@pytest.mark.parametrize(("what", "values"), ROWS, ids=[what for what, _ in ROWS])
def test_a_row_has_the_limit_of_the_code(what: str, values: list[str]) -> None:
    found = row(what)
    for value in values:
        assert value in found


SENTENCES = [
    f"`[limits] share`, {'a quarter' if LIMITS.share == 0.25 else LIMITS.share} by default",
    f"{slots.IDENTIFY_S:g} s each",
    f"up to {sign_ins._LONGEST_S:g} s",
    f"after {sign_ins._FIRST_S:g} s",
    f"at least {slots._LEAST_PASSING} ",
    f"A turn has up to {tls_acceptor._CONTINUED_AT_ONCE} handshakes",
    f"{retries._CAUSE_CHARACTERS // 1024} Ki characters",
    f"After {turns.TURN_S * 1000:g} ms of a turn",
    f"in parts of about {turns.QUANTUM_S * 1000:g} ms",
    f"after {StoreLimits().patience_s * 1000:g} ms",
    f"frames up to {size(gateway.NEWCOMER_FRAME_BYTES)}",
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_has_the_number_of_the_code(sentence: str) -> None:
    assert sentence in FLAT
