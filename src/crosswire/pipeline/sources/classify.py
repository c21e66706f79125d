"""Which protocol does a connection speak: by configuration and port, else by its first bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from crosswire.errors import InvalidInput
from crosswire.lake.schemas import DATA
from crosswire.pipeline.protocols.contract import TLS
from crosswire.pipeline.sources.reassembly import Run
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.sniff import sniff

__all__ = ["Classified", "PortMap", "classify", "looks_like_tls"]

_SNIFF_BYTES: Final = 256
_SNIFF_RUNS: Final = 64


class Spoken(NamedTuple):
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

    def spoken(self, port: int) -> Spoken:
        listener = _listeners().get(port)
        if port in self.configured:
            return Spoken(self.configured[port], listener and listener.listener)
        return listener or Spoken(None, None)


def _listeners() -> dict[int, Spoken]:
    if not _LISTENERS:
        for name in PROTOCOL_NAMES:
            for listener, port in protocol(name).ports.items():
                spoken = TLS if listener.endswith("-tls") else name
                _LISTENERS[port] = Spoken(spoken, listener)
    return _LISTENERS


_LISTENERS: dict[int, Spoken] = {}


class Classified(NamedTuple):
    """A run of which it is known who opened the connection and what is spoken on it."""

    run: Run
    forward: bool
    opener_is_forward: bool
    spoken: Spoken


def classify(
    runs: Iterable[Run], forward_port: int, backward_port: int, ports: PortMap
) -> Iterator[Classified]:
    """The runs of a flow, each connection's first ones held back until its protocol is known.

    `forward` in what comes out is the connection's: sent by who opened it.
    """
    held: list[Run] = []
    known: tuple[bool, Spoken] | None = None
    number = -1
    for run in runs:
        if run.connection != number:
            yield from _stamped(held, forward_port, backward_port, ports)
            held, known, number = [], None, run.connection
        if known is None:
            held.append(run)
            known = _decide(held, forward_port, backward_port, ports, final=False)
            if known is not None:
                yield from _all_stamped(held, *known)
                held = []
        else:
            yield _stamp(run, *known)
    yield from _stamped(held, forward_port, backward_port, ports)


def _stamped(
    held: list[Run], forward_port: int, backward_port: int, ports: PortMap
) -> Iterator[Classified]:
    if held:
        known = _decide(held, forward_port, backward_port, ports, final=True)
        assert known is not None
        yield from _all_stamped(held, *known)


def _all_stamped(runs: list[Run], opener: bool, spoken: Spoken) -> Iterator[Classified]:
    return (_stamp(run, opener, spoken) for run in runs)


def _stamp(run: Run, opener: bool, spoken: Spoken) -> Classified:
    return Classified(run, run.forward is opener, opener, spoken)


def _decide(
    held: list[Run], forward_port: int, backward_port: int, ports: PortMap, *, final: bool
) -> tuple[bool, Spoken] | None:
    opener = held[0].opener
    spoken_there = ports.spoken(backward_port)
    spoken_here = ports.spoken(forward_port)
    if opener is None:
        if spoken_there.protocol or spoken_here.protocol:
            opener = spoken_there.protocol is not None
        else:
            # Servers have the low ports.
            opener = forward_port >= backward_port
    spoken = spoken_there if opener else spoken_here
    if spoken.protocol is not None:
        return opener, spoken
    name = _sniffed(held)
    if name is not None:
        return opener, Spoken(name, spoken.listener)
    seen = sum(len(run.data or b"") for run in held)
    if final or held[0].late or seen >= _SNIFF_BYTES or len(held) >= _SNIFF_RUNS:
        return opener, spoken
    return None


def _sniffed(held: list[Run]) -> str | None:
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
