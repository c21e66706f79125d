"""The columns that are the same in all rows of a connection, for many connections at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosswire.capture.classify import DetectedProtocol, PortMap
from crosswire.capture.flows import ADDRESS_BYTES, END_BYTES, FLOW_BYTES, address_of
from crosswire.pipeline.decode.text import Coded, Decimal, Fixed, TextPart, distinct, text

__all__ = ["UNKNOWN", "BatchConnections", "Ports", "coded"]

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

UNKNOWN: Final = 0
"""The code of a connection whose ports reveal no protocol."""

_PORT: Final = np.dtype(">u2")
_ZEROS: Final = [zeros * "0" for zeros in range(6)]
_TENS: Final = 10 ** np.arange(1, 6)


def coded(indices: Any, values: pa.Array) -> pa.Array:
    """A dictionary column: `values` by index."""
    return pa.DictionaryArray.from_arrays(indices, values)


class Ports:
    """Protocols by port as numbers, for columns: indexes of `known`."""

    def __init__(self, ports: PortMap) -> None:
        self.map = ports
        self.known = [DetectedProtocol(None, None)]
        self._codes = {self.known[UNKNOWN]: UNKNOWN}
        self._of_port = np.full(1 << 16, UNKNOWN)
        self._of_clients = np.array([ports.may_be_client(port) for port in range(1 << 16)])
        for port in ports.ports:
            self._of_port[port] = self.code(ports.protocol_at(port))

    def code(self, detected: DetectedProtocol) -> int:
        """The index of a protocol in `known`, where it is added if it is new."""
        code = self._codes.setdefault(detected, len(self.known))
        if code == len(self.known):
            self.known.append(detected)
        return code

    def detect(self, here: Numbers, there: Numbers, openers: Numbers) -> tuple[Flags, Numbers]:
        """For each connection, whether the forward end, with the port `here`, opened it, and its
        protocol; `openers` is -1 where the SYN was not captured. The same as in `capture.classify`.
        """
        code_here, code_there = self._of_port[here], self._of_port[there]
        # As `PortMap.accepts_at` has it; else the side with the lower port accepted it.
        client_here, client_there = self._of_clients[here], self._of_clients[there]
        accepts_there = (code_there != UNKNOWN) & (~client_there | client_here)
        accepts_here = (code_here != UNKNOWN) & (~client_here | client_there)
        guessed = np.where(accepts_there | accepts_here, accepts_there, here >= there)
        opened = np.where(openers < 0, guessed, openers > 0)
        return opened, np.where(opened, code_there, code_here)


@dataclass
class BatchConnections:
    """The connections of a batch's rows, in their order; `starts` has the first row of each.

    `numbers` count the connections of a flow, `times` are those of their first rows, in ns.
    `openers` is whether the forward end opened them, `protocols` are indexes of `Ports.known`.
    """

    starts: Numbers
    flows: npt.NDArray[np.uint8]
    numbers: Numbers
    times: Numbers
    openers: Flags
    protocols: Numbers

    @classmethod
    def of(
        cls,
        starts: Numbers,
        flows: npt.NDArray[np.uint8],
        numbers: Numbers,
        times: Numbers,
        openers: Numbers,
        ports: Ports,
    ) -> BatchConnections:
        """With the protocols that ports reveal."""
        detected = ports.detect(*_ports(flows), openers)
        return cls(starts, flows, numbers, times, *detected)

    def __len__(self) -> int:
        return len(self.starts)

    def ports(self, index: int) -> tuple[int, int]:
        """The ports of one connection: of the forward end and of the other."""
        forward, backward = _ports(self.flows[index : index + 1])
        return int(forward[0]), int(backward[0])

    def first(self, count: int) -> BatchConnections:
        """The first `count` of them."""
        return BatchConnections(
            self.starts[:count],
            self.flows[:count],
            self.numbers[:count],
            self.times[:count],
            self.openers[:count],
            self.protocols[:count],
        )

    def columns(
        self, which: npt.NDArray[np.int32], known: list[DetectedProtocol]
    ) -> dict[str, pa.Array]:
        """The columns of rows; `which` has each row's connection, as an index of these."""
        count = len(self)
        addresses, words = self._addresses()
        forward, backward = _ports(self.flows)
        opened = self.openers
        (source, target), (port, other) = (
            (np.where(opened, one, two), np.where(opened, two, one))
            for one, two in ((addresses[:count], addresses[count:]), (forward, backward))
        )
        name = _name(words, source, port, target, other, self.times)
        texts = pa.array(words)

        def dictionary_column(values: list[str | None]) -> pa.Array:
            some = pa.array(values, pa.string()).dictionary_encode()
            own = some.indices.take(pa.array(self.protocols))
            if own.null_count:
                return coded(own.take(pa.array(which)), some.dictionary)
            return coded(own.to_numpy()[which], some.dictionary)

        def number(values: Numbers) -> npt.NDArray[np.int32]:
            return values.astype(np.int32)[which]

        return {
            "connection": coded(which, name),
            "protocol": dictionary_column([detected.protocol for detected in known]),
            "listener": dictionary_column([detected.listener for detected in known]),
            "connector_address": coded(number(source), texts),
            "connector_port": pa.array(number(port)),
            "acceptor_address": coded(number(target), texts),
            "acceptor_port": pa.array(number(other)),
        }

    def _addresses(self) -> tuple[Numbers, list[str]]:
        """The addresses of all forward ends, then of all others, as indexes of a list of texts."""
        octets = self.flows.reshape(-1)
        forward = np.arange(0, len(octets), FLOW_BYTES)
        starts = np.concatenate((forward, forward + END_BYTES))
        codes, firsts = distinct(octets, starts, np.full(len(starts), ADDRESS_BYTES))
        indexes = starts[firsts].tolist()
        return codes, [address_of(octets[at : at + ADDRESS_BYTES].tobytes()) for at in indexes]


def _ports(flows: npt.NDArray[np.uint8]) -> tuple[Numbers, Numbers]:
    """The ports of the forward ends, and of the others."""
    forward, backward = (
        np.ascontiguousarray(flows[:, end - 2 : end]).view(_PORT)[:, 0].astype(np.int64)
        for end in (END_BYTES, FLOW_BYTES)
    )
    return forward, backward


def _name(
    words: list[str],
    source: Numbers,
    port: Numbers,
    target: Numbers,
    other: Numbers,
    times: Numbers,
) -> pa.Array:
    """The names that `connection_name` gives, as one column."""
    count = len(times)
    every = np.ones(count, np.bool_)
    seconds, micros = np.divmod(times // 1000, 1_000_000)
    padding = np.int64(5) - np.searchsorted(_TENS, micros, "right")
    parts: list[TextPart] = [
        Coded(source, words),
        Fixed(":", every),
        Decimal(port, every),
        Fixed("-", every),
        Coded(target, words),
        Fixed(":", every),
        Decimal(other, every),
        Fixed("@", every),
        Fixed("-", seconds < 0),
        Decimal(np.abs(seconds), every),
        Fixed(".", every),
        Coded(padding, _ZEROS),
        Decimal(micros, every),
    ]
    return text(count, *parts)
