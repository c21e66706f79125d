"""Which protocol a connection uses: by configuration and port, else by its first bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from crosswire.capture.reassembly import ReassembledRun
from crosswire.errors import InvalidInput
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.registry import sniff
from crosswire.wire.runs import DATA

__all__ = [
    "EPHEMERAL_PORTS",
    "TLS",
    "Classified",
    "Classifier",
    "DetectedProtocol",
    "PortMap",
    "classify",
    "decide",
    "looks_like_tls",
]

TLS: Final = "tls"
"""Stands for the protocol of connections that are encrypted, so that their frames can't be read."""

EPHEMERAL_PORTS: Final = range(32_768, 65_536)
"""From which systems take the ports of clients: Linux from the lower end, others from the middle.
Some of our listeners have a port there too."""

_SNIFF_BYTES: Final = 256
"""A connection whose protocol is not found in so few bytes stays without one."""
_SNIFF_RUNS: Final = 64
"""A sender of single bytes must not have runs held back without limit."""


class DetectedProtocol(NamedTuple):
    """`listener` is the name of the hub's listener that has this port by default."""

    protocol: str | None
    listener: str | None


@dataclass(frozen=True)
class PortMap:
    """Protocols by port. `configured` takes precedence over the protocols' default ports.

    Raises InvalidInput for a protocol that does not exist.
    """

    configured: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for port, name in self.configured.items():
            if name not in (*PROTOCOL_NAMES, TLS):
                names = ", ".join((*PROTOCOL_NAMES, TLS))
                raise InvalidInput(f"port {port}: there is no protocol {name!r}; there are {names}")

    @property
    def ports(self) -> set[int]:
        """The ports whose protocol is known."""
        return {*_listeners(), *self.configured}

    def may_be_client(self, port: int) -> bool:
        """Whether a client may have been given this port, though it may be a listener's too. A
        configured one is a listener's."""
        return port in EPHEMERAL_PORTS and port not in self.configured

    def accepts_at(self, port: int, other: int) -> bool:
        """Whether the end with this port probably accepted a connection whose opening was not
        captured: its protocol is known, and if clients have such ports, the other end's port is
        theirs too."""
        if self.protocol_at(port).protocol is None:
            return False
        return not self.may_be_client(port) or self.may_be_client(other)

    def protocol_at(self, port: int) -> DetectedProtocol:
        """The protocol of a server's port, both fields None if it is not known."""
        listener = _listeners().get(port)
        if port in self.configured:
            return DetectedProtocol(self.configured[port], listener and listener.listener)
        return listener or DetectedProtocol(None, None)


def _listeners() -> dict[int, DetectedProtocol]:
    if not _LISTENERS:
        for name in PROTOCOL_NAMES:
            for listener, port in protocol(name).ports.items():
                detected = TLS if listener.endswith("-tls") else name
                _LISTENERS[port] = DetectedProtocol(detected, listener)
    return _LISTENERS


_LISTENERS: dict[int, DetectedProtocol] = {}


class Classified(NamedTuple):
    """A run whose connection's opener and protocol are known. `forward` is the connection's
    direction: sent by the side that opened it."""

    run: ReassembledRun
    forward: bool
    opener_is_forward: bool
    detected: DetectedProtocol


def classify(
    runs: Iterable[ReassembledRun], forward_port: int, backward_port: int, ports: PortMap
) -> Iterator[Classified]:
    """Classify all runs of a flow: see Classifier."""
    classifier = Classifier(forward_port, backward_port, ports)
    for run in runs:
        yield from classifier.add(run)
    yield from classifier.finish()


def decide(
    runs: Iterable[ReassembledRun],
    forward_port: int,
    backward_port: int,
    ports: PortMap,
    *,
    complete: bool,
) -> tuple[bool, DetectedProtocol] | None:
    """Whether the flow's forward end opened the connection of these runs, and its protocol; None if
    they are too few to decide and more may follow (not `complete`)."""
    held: list[ReassembledRun] = []
    for run in runs:
        held.append(run)
        known = _decide(held, forward_port, backward_port, ports, final=False)
        if known is not None:
            return known
    return _decide(held, forward_port, backward_port, ports, final=True) if complete else None


class Classifier:
    """Classifies the runs of a flow. The first runs of each connection are held back until its
    protocol is known, so that all rows of a connection have the same."""

    def __init__(self, forward_port: int, backward_port: int, ports: PortMap) -> None:
        self._ends = (forward_port, backward_port, ports)
        self._number = -1
        self._held: list[ReassembledRun] = []
        self._known: tuple[bool, DetectedProtocol] | None = None

    def add(self, run: ReassembledRun) -> Iterable[Classified]:
        """The runs that are classified with this one: none while the protocol is undecided."""
        if self._known is not None and run.connection == self._number:
            return (_stamp(run, *self._known),)
        return self._add(run)

    def _add(self, run: ReassembledRun) -> Iterator[Classified]:
        if run.connection != self._number:
            yield from self.finish()
            self._known, self._number = None, run.connection
        self._held.append(run)
        self._known = _decide(self._held, *self._ends, final=False)
        if self._known is not None:
            yield from self._release(*self._known)

    def finish(self) -> Iterator[Classified]:
        """The held runs of the last connection, which has no more: decided with what is there."""
        if self._held:
            known = _decide(self._held, *self._ends, final=True)
            assert known is not None
            yield from self._release(*known)

    def _release(self, opener: bool, detected: DetectedProtocol) -> Iterator[Classified]:
        held, self._held = self._held, []
        return (_stamp(run, opener, detected) for run in held)

    def save(self) -> Any:
        """The whole state in types that msgpack has, for `restore`."""
        return self._number, self._held, self._known

    def restore(self, saved: Any) -> None:
        """Continue where `save` was called. Raises TypeError or ValueError for damaged state."""
        self._number, held, known = saved
        self._held = [ReassembledRun(*run) for run in held]
        self._known = None if known is None else (known[0], DetectedProtocol(*known[1]))


def _stamp(run: ReassembledRun, opener: bool, detected: DetectedProtocol) -> Classified:
    return Classified(run, run.forward is opener, opener, detected)


def _decide(
    held: list[ReassembledRun],
    forward_port: int,
    backward_port: int,
    ports: PortMap,
    *,
    final: bool,
) -> tuple[bool, DetectedProtocol] | None:
    opener = held[0].opener
    at_backward = ports.protocol_at(backward_port)
    at_forward = ports.protocol_at(forward_port)
    if opener is None:
        accepts = ports.accepts_at(backward_port, forward_port)
        if accepts or ports.accepts_at(forward_port, backward_port):
            opener = accepts
        else:
            # Clients get their ports from the upper range.
            opener = forward_port >= backward_port
    detected = at_backward if opener else at_forward
    if detected.protocol is not None:
        return opener, detected
    name = _sniffed(held)
    if name is not None:
        return opener, DetectedProtocol(name, detected.listener)
    seen = sum(len(run.data or b"") for run in held)
    if final or held[0].late or seen >= _SNIFF_BYTES or len(held) >= _SNIFF_RUNS:
        return opener, detected
    return None


def _sniffed(held: list[ReassembledRun]) -> str | None:
    """The protocol by the first bytes of either direction; a late direction has not its first."""
    for forward in (True, False):
        own = [run for run in held if run.forward is forward and run.kind == DATA]
        if not own or own[0].late or own[0].offset:
            continue
        head = b"".join(run.data or b"" for run in own)[:_SNIFF_BYTES]
        name = TLS if looks_like_tls(head) else sniff(head)
        if name is not None:
            return name
    return None


def looks_like_tls(data: bytes) -> bool:
    """Whether bytes begin with a TLS handshake record, of any version, with a ClientHello or a
    ServerHello."""
    # Record type 22 (handshake) · version 3.0 to 3.4 · length 2 · message type 1 or 2.
    return len(data) >= 6 and data[:2] == b"\x16\x03" and data[2] <= 4 and data[5] in (1, 2)
