"""Which protocol does a connection speak: by configuration and port, else by its first bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from crosswire.capture.reassembly import ReassembledRun
from crosswire.errors import InvalidInput
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.runs import DATA
from crosswire.wire.sniff import sniff

__all__ = [
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

_SNIFF_BYTES: Final = 256
_SNIFF_RUNS: Final = 64


class DetectedProtocol(NamedTuple):
    """`listener` is the name of the port, where it is one of ours."""

    protocol: str | None
    listener: str | None


@dataclass(frozen=True)
class PortMap:
    """What is spoken on which port. `configured` outranks the protocols' own default ports."""

    configured: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for port, name in self.configured.items():
            if name not in (*PROTOCOL_NAMES, TLS):
                names = ", ".join((*PROTOCOL_NAMES, TLS))
                raise InvalidInput(f"port {port} can't speak {name!r}; there are {names}")

    @property
    def ports(self) -> set[int]:
        """Those that tell it."""
        return {*_listeners(), *self.configured}

    def protocol_at(self, port: int) -> DetectedProtocol:
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
    """A run of which it is known who opened the connection and what is spoken on it."""

    run: ReassembledRun
    forward: bool
    opener_is_forward: bool
    detected: DetectedProtocol


def classify(
    runs: Iterable[ReassembledRun], forward_port: int, backward_port: int, ports: PortMap
) -> Iterator[Classified]:
    """All the runs of a flow at once: see Classifier."""
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
    """Whether the forward end opened the connection of these runs, and what is spoken on it; None
    if they are not `complete` and not enough to tell."""
    held: list[ReassembledRun] = []
    for run in runs:
        held.append(run)
        known = _decide(held, forward_port, backward_port, ports, final=False)
        if known is not None:
            return known
    return _decide(held, forward_port, backward_port, ports, final=True) if complete else None


class Classifier:
    """Takes the runs of a flow; each connection's first ones are held back until its protocol is
    known.

    `forward` in what comes out is the connection's: sent by who opened it.
    """

    def __init__(self, forward_port: int, backward_port: int, ports: PortMap) -> None:
        self._ends = (forward_port, backward_port, ports)
        self._number = -1
        self._held: list[ReassembledRun] = []
        self._known: tuple[bool, DetectedProtocol] | None = None

    def add(self, run: ReassembledRun) -> Iterable[Classified]:
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
        """No more runs will come of this connection."""
        if self._held:
            known = _decide(self._held, *self._ends, final=True)
            assert known is not None
            yield from self._release(*known)

    def _release(self, opener: bool, detected: DetectedProtocol) -> Iterator[Classified]:
        held, self._held = self._held, []
        return (_stamp(run, opener, detected) for run in held)

    def save(self) -> Any:
        """The whole state, as msgpack can hold it, to be given to `restore`."""
        return self._number, self._held, self._known

    def restore(self, saved: Any) -> None:
        """Go on where `save` was called. Raises TypeError or ValueError if it's damaged."""
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
        if at_backward.protocol or at_forward.protocol:
            opener = at_backward.protocol is not None
        else:
            # Servers have the low ports.
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
    """From either side's first bytes; those behind a late start are not the first."""
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
    """A handshake record of any version that begins with one of the two hellos."""
    return len(data) >= 6 and data[:2] == b"\x16\x03" and data[2] <= 4 and data[5] in (1, 2)
