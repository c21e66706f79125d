"""What all rows of a connection have in common, for many connections at once, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosswire.capture.classify import DetectedProtocol, PortMap
from crosswire.capture.flows import ADDRESS_BYTES, END_BYTES, FLOW_BYTES, address_of
from crosswire.pipeline.decode.text import Coded, Decimal, Fixed, TextPart, distinct, text

__all__ = ["NOBODY", "BatchConnections", "Ports", "coded"]

Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

NOBODY: Final = 0
"""Stands for what is spoken where no port tells it."""

_PORT: Final = np.dtype(">u2")
_ZEROS: Final = [zeros * "0" for zeros in range(6)]
_TENS: Final = 10 ** np.arange(1, 6)


def coded(indices: Any, values: pa.Array) -> pa.Array:
    return pa.DictionaryArray.from_arrays(indices, values)


class Ports:
    """What is spoken on which port: numbers, places in `known`."""

    def __init__(self, ports: PortMap) -> None:
        self.map = ports
        self.known = [DetectedProtocol(None, None)]
        self._codes = {self.known[NOBODY]: NOBODY}
        self._of_port = np.full(1 << 16, NOBODY)
        for port in ports.ports:
            self._of_port[port] = self.code(ports.protocol_at(port))

    def code(self, detected: DetectedProtocol) -> int:
        code = self._codes.setdefault(detected, len(self.known))
        if code == len(self.known):
            self.known.append(detected)
        return code

    def detect(self, here: Numbers, there: Numbers, openers: Numbers) -> tuple[Flags, Numbers]:
        """Whether the forward end, which has the port `here`, opened each connection (-1: it was
        not seen), and what is spoken there: as `classify` has it."""
        code_here, code_there = self._of_port[here], self._of_port[there]
        # Who has a port of ours was called, else who has the lower one.
        is_detected = (code_here != NOBODY) | (code_there != NOBODY)
        guessed = np.where(is_detected, code_there != NOBODY, here >= there)
        opened = np.where(openers < 0, guessed, openers > 0)
        return opened, np.where(opened, code_there, code_here)


@dataclass
class BatchConnections:
    """Those that the rows of a batch belong to, one after the other: each from `starts` on.

    `numbers` are their places in their `flows`, `times` those of their first rows, in ns. `openers`
    says whether the forward end opened them, `protocols` is one of `Ports.known`.
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
        """As far as their ports tell."""
        detected = ports.detect(*_ports(flows), openers)
        return cls(starts, flows, numbers, times, *detected)

    def __len__(self) -> int:
        return len(self.starts)

    def ports(self, index: int) -> tuple[int, int]:
        """Of the forward end and of the other."""
        forward, backward = _ports(self.flows[index : index + 1])
        return int(forward[0]), int(backward[0])

    def first(self, count: int) -> BatchConnections:
        """So many of them."""
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
        """Of rows, each of the connection that `which` says."""
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
        """Of all forward ends, then of all others; as numbers, and what they stand for."""
        octets = self.flows.reshape(-1)
        forward = np.arange(0, len(octets), FLOW_BYTES)
        starts = np.concatenate((forward, forward + END_BYTES))
        codes, firsts = distinct(octets, starts, np.full(len(starts), ADDRESS_BYTES))
        indexes = starts[firsts].tolist()
        return codes, [address_of(octets[at : at + ADDRESS_BYTES].tobytes()) for at in indexes]


def _ports(flows: npt.NDArray[np.uint8]) -> tuple[Numbers, Numbers]:
    """Of the forward ends, and of the others."""
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
    """Like `connection_name`."""
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
