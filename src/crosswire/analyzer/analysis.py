"""A capture as connections and frames, in the order of the capture.

Frames are given as they are completed, so that a capture of any size takes the memory of what is
incomplete in it, and of its connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from crosswire.analyzer.conversations import Conversations, Subject
from crosswire.analyzer.decoded_frames import AnnotatedFrame, FrameReader
from crosswire.capture.classify import TLS, Classified, Classifier, PortMap
from crosswire.capture.flows import END_BYTES, FlowEnd, connection_name, end_of
from crosswire.capture.packet_counts import PacketCounts
from crosswire.capture.reader import read_segments
from crosswire.capture.reassembly import Flow
from crosswire.errors import InvalidInput
from crosswire.wire.contract import Gap
from crosswire.wire.registry import protocol, sniff
from crosswire.wire.runs import BACKWARD, DATA, FIN, FORWARD, GAP, RESET

__all__ = ["AnalyzedConnection", "AnalyzedFrame", "CaptureAnalysis"]

_MOST_CONNECTIONS: Final = 10_000
_KEPT_BYTES: Final = 1 << 20
_SNIFF_BYTES: Final = 256
_LATEST_US: Final = 253_402_300_799_999_999
"""The end of the year 9999."""


class AnalyzedConnection(msgspec.Struct, kw_only=True):
    """A connection of a capture. Changes while the capture is read."""

    number: int
    """Its number in the capture, from 1."""
    name: str
    """`CLIENT:PORT-SERVER:PORT@SECONDS`; of raw bytes, the sender's role."""
    protocol: str
    """Empty if it was not recognized, `tls` if it is encrypted."""
    listener: str
    """The name of the hub's listener with this port; empty for other ports."""
    client: str
    """Address and port of the side that connected."""
    server: str
    """Address and port of the side that accepted."""
    first_us: int
    """When its first packet was captured, in µs since 1970."""
    last_us: int
    frames: int = 0
    violations: int = 0
    forward_bytes: int = 0
    """Bytes from the side that connected."""
    backward_bytes: int = 0
    missing_bytes: int = 0
    """Bytes that the capture lacks."""
    unread_bytes: int = 0
    """Bytes after a violation that leaves it unknown where the next frame begins, and of frames
    that the capture does not complete."""
    is_late: bool = False
    """Whether its beginning was not captured."""
    end: str = "open"
    """`open`, `closed` or `reset`."""


class AnalyzedFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A frame of a connection, and what it is about."""

    number: int
    connection: AnalyzedConnection
    time_us: int
    is_forward: bool
    sender: str
    """The sender's role in the protocol."""
    decoded: AnnotatedFrame
    subject: Subject

    @property
    def direction(self) -> str:
        """`forward` or `backward`."""
        return FORWARD if self.is_forward else BACKWARD


class CaptureAnalysis:
    """Reads one capture; `connections` and `counts` are complete when all frames were taken."""

    def __init__(self, ports: Mapping[int, str] | None = None) -> None:
        """`ports` names protocols by port. Raises InvalidInput for one that does not exist."""
        self.connections: list[AnalyzedConnection] = []
        self.counts = PacketCounts()
        self.ignored_connections = 0
        """Connections beyond the limit of their number."""
        self._ports = PortMap(ports or {})
        self._frames = 0

    def frames(self, path: str) -> Iterator[AnalyzedFrame]:
        """The frames of a pcap or pcapng file, plain or compressed; of one that is damaged in the
        middle those before the damage, which `counts` has. Raises InvalidInput."""
        flows: dict[bytes, _AnalyzedFlow] = {}
        for key, segment in read_segments(path, self.counts, skip_damaged=True):
            flow = flows.get(key)
            if flow is None:
                if len(flows) >= _MOST_CONNECTIONS:
                    self.ignored_connections += 1
                    continue
                ends = end_of(key[:END_BYTES]), end_of(key[END_BYTES:])
                flow = flows[key] = _AnalyzedFlow(self, *ends)
            for run in flow.flow.add(segment):
                for each in flow.classifier.add(run):
                    yield from flow.take(each)
        for flow in flows.values():
            for run in flow.flow.finish():
                for each in flow.classifier.add(run):
                    yield from flow.take(each)
            for each in flow.classifier.finish():
                yield from flow.take(each)
            flow.finish()

    def raw_frames(
        self, chunks: Iterable[bytes], name: str, sender: str = "", *, late: bool = False
    ) -> Iterator[AnalyzedFrame]:
        """The frames of raw bytes of one direction, which have no time. Without a protocol's name
        it is recognized by the first bytes. Raises InvalidInput."""
        head = b""
        rest = iter(chunks)
        if not name:
            while len(head) < _SNIFF_BYTES and (chunk := next(rest, b"")):
                head += chunk
            found = sniff(head[:_SNIFF_BYTES])
            if found is None:
                raise InvalidInput(
                    "neither a capture (pcap, pcapng) nor the beginning of a connection in a known"
                    " protocol: name the protocol"
                )
            name = found
        roles = protocol(name).roles
        if sender and sender not in roles:
            raise InvalidInput(f"the sender is one of {', '.join(roles)}, not {sender!r}")
        sender = sender or roles[0]
        connection = AnalyzedConnection(
            number=1,
            name=f"raw {name} from {sender}",
            protocol=name,
            listener="",
            client="",
            server="",
            first_us=0,
            last_us=0,
            is_late=late,
        )
        self.connections.append(connection)
        is_forward = sender != roles[-1]
        decoding = _Decoding(self, connection, sender if is_forward else roles[0], late)
        if head:
            yield from decoding.data(is_forward, head, 0)
        for chunk in rest:
            yield from decoding.data(is_forward, chunk, 0)
        decoding.finish()

    def next_number(self) -> int:
        """The number of the next frame."""
        self._frames += 1
        return self._frames


class _AnalyzedFlow:
    """All traffic between two ends: one connection after the other."""

    def __init__(self, analysis: CaptureAnalysis, lower: FlowEnd, higher: FlowEnd) -> None:
        self.flow = Flow()
        self.classifier = Classifier(lower[1], higher[1], analysis._ports)
        self._analysis = analysis
        self._ends = (lower, higher)
        self._number = -1
        self._connection: AnalyzedConnection | None = None
        self._decoding: _Decoding | None = None

    def take(self, classified: Classified) -> Iterator[AnalyzedFrame]:
        """The frames that a run completes."""
        run = classified.run
        if run.connection != self._number:
            self.finish()
            self._number = run.connection
            self._open(classified)
        connection, decoding = self._connection, self._decoding
        if connection is None:
            return
        time_us = _microseconds(run.time_ns)
        connection.last_us = max(connection.last_us, time_us)
        if run.kind == DATA and run.data:
            if decoding is not None:
                yield from decoding.data(classified.forward, run.data, time_us, late=run.late)
            elif classified.forward:
                connection.forward_bytes += len(run.data)
            else:
                connection.backward_bytes += len(run.data)
        elif run.kind == GAP:
            connection.missing_bytes += run.length
            if decoding is not None:
                yield from decoding.gap(classified.forward, run.length, time_us)
        elif run.kind == RESET:
            connection.end = "reset"
        elif run.kind == FIN and connection.end == "open":
            connection.end = "closed"

    def _open(self, classified: Classified) -> None:
        analysis, run, detected = self._analysis, classified.run, classified.detected
        if len(analysis.connections) >= _MOST_CONNECTIONS:
            analysis.ignored_connections += 1
            self._connection = None
            return
        client, server = self._ends if classified.opener_is_forward else self._ends[::-1]
        self._connection = connection = AnalyzedConnection(
            number=len(analysis.connections) + 1,
            name=connection_name(client, server, run.time_ns),
            protocol=detected.protocol or "",
            listener=detected.listener or "",
            client=_text(client),
            server=_text(server),
            first_us=_microseconds(run.time_ns),
            last_us=_microseconds(run.time_ns),
            is_late=run.opener is None,
        )
        analysis.connections.append(connection)
        if connection.protocol in ("", TLS):
            return
        # eMQP has a listener for each role.
        roles = protocol(connection.protocol).roles
        named = connection.listener.removeprefix("emqp-").removesuffix("s")
        connector = named if named in roles else roles[0]
        self._decoding = _Decoding(analysis, connection, connector, run.opener is None)

    def finish(self) -> None:
        """The connection has no more bytes."""
        if self._decoding is not None:
            self._decoding.finish()
        self._decoding = None


class _Decoding:
    """Both directions of a connection, decoded. The peers' readers know each other: one side's
    handshake may determine how the other's bytes are read."""

    def __init__(
        self, analysis: CaptureAnalysis, connection: AnalyzedConnection, connector: str, late: bool
    ) -> None:
        self._analysis = analysis
        self._connection = connection
        name = connection.protocol
        acceptor = protocol(name).roles[-1]
        self._senders = {True: connector, False: acceptor}
        forward = FrameReader(name, connector, late=late, kept_bytes=_KEPT_BYTES)
        backward = FrameReader(name, acceptor, late=late, peer=forward, kept_bytes=_KEPT_BYTES)
        self._readers = {True: forward, False: backward}
        self._subjects = Conversations()
        self._is_late = late

    def data(
        self, is_forward: bool, data: bytes, time_us: int, *, late: bool = False
    ) -> Iterator[AnalyzedFrame]:
        """The frames that these bytes complete."""
        connection = self._connection
        if is_forward:
            first, connection.forward_bytes = (
                connection.forward_bytes == 0,
                (connection.forward_bytes + len(data)),
            )
        else:
            first, connection.backward_bytes = (
                connection.backward_bytes == 0,
                (connection.backward_bytes + len(data)),
            )
        reader = self._readers[is_forward]
        if first and late and not self._is_late:
            # Its opening was captured, but this direction's first bytes were not.
            yield from self._shown(is_forward, reader.skip(0), time_us)
        yield from self._shown(is_forward, reader.feed(data), time_us)

    def gap(self, is_forward: bool, count: int, time_us: int) -> Iterator[AnalyzedFrame]:
        """These bytes are missing."""
        self._subjects.interrupt()
        yield from self._shown(is_forward, self._readers[is_forward].skip(count), time_us)

    def _shown(
        self, is_forward: bool, decoded: list[AnnotatedFrame], time_us: int
    ) -> Iterator[AnalyzedFrame]:
        connection = self._connection
        for each in decoded:
            if isinstance(each.item, Gap) and not each.length:
                continue
            connection.frames += each.violation is None
            connection.violations += each.violation is not None
            yield AnalyzedFrame(
                number=self._analysis.next_number(),
                connection=connection,
                time_us=time_us,
                is_forward=is_forward,
                sender=self._senders[is_forward],
                decoded=each,
                subject=self._subjects.subject(each.item, is_forward),
            )

    def finish(self) -> None:
        """Count what could not be read."""
        for reader in self._readers.values():
            decoder = reader.decoder
            self._connection.unread_bytes += decoder.unread + decoder.pending


def _microseconds(time_ns: int) -> int:
    """A capture may have any time: those that no calendar has are the last that one has."""
    return min(max(time_ns // 1000, 0), _LATEST_US)


def _text(end: FlowEnd) -> str:
    host, port = end
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
