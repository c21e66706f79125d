"""eMQP's decoder: one direction, from bytes to frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from crosswire.errors import MalformedFrame
from crosswire.wire.contract import Decoder, Frame, Limits, Placed, one_of
from crosswire.wire.emqp.frames import DEFAULTS, parse, parse_delivery
from crosswire.wire.emqp.layout import DELIVERY_PARTS
from crosswire.wire.zmtp.decoder import ZmtpDecoder
from crosswire.wire.zmtp.frames import Command, Message, parse_metadata
from crosswire.wire.zmtp.layout import (
    METADATA_COMMANDS,
    PROPERTY_SOCKET_TYPE,
    PUBLISHING_SOCKETS,
    SILENT_SOCKETS,
    SUBSCRIPTION_CANCEL,
    SUBSCRIPTION_SUBSCRIBE,
)

__all__ = ["EmqpDecoder"]

_SUBSCRIPTIONS: Final = (bytes((SUBSCRIPTION_CANCEL,)), bytes((SUBSCRIPTION_SUBSCRIBE,)))


class EmqpDecoder(ZmtpDecoder):
    """One direction of eMQP: ZMTP on layer 0, and the command in each message on layer 1.

    What a message contains depends on the type of the sender's socket, which is in the handshake.
    If that was not captured, two parts from the broker are taken for a publication, and a single
    part that begins with byte 0 or 1 for a subscription.
    """

    def __init__(
        self,
        sender: str,
        *,
        limits: Limits | None = None,
        late: bool = False,
        peer: Decoder | None = None,
        hints: Mapping[str, int] | None = None,
    ) -> None:
        limits = one_of(limits, DEFAULTS)
        super().__init__(sender, limits=limits, late=late, peer=peer, hints=hints)
        self.socket_type: str | None = None

    def feed(self, data: bytes) -> list[Placed]:
        """ZMTP's frames, each message followed by its command, at the same offset."""
        placed: list[Placed] = []
        for item in super().feed(data):
            placed.append(item)
            frame = item[2]
            if type(frame) is Message:
                command = self._read(frame.parts)
                if command is not None:
                    placed.append((item[0], item[1], command))
            # CURVE's metadata is encrypted, but then all messages are, too.
            elif type(frame) is Command and frame.name in METADATA_COMMANDS and not frame.sealed:
                self.socket_type = _socket_type(frame.body)
        return placed

    def _read(self, parts: Sequence[bytes]) -> Frame | None:
        if self.socket_type is None:
            if self.sender == "broker" and len(parts) == DELIVERY_PARTS:
                return parse_delivery(parts)
            if len(parts) == 1 and parts[0][:1] in _SUBSCRIPTIONS:
                return None
        elif self.socket_type in SILENT_SOCKETS:
            return None
        elif self.socket_type in PUBLISHING_SOCKETS:
            return parse_delivery(parts)
        return parse(parts)

    def _save(self) -> Any:
        return [self.socket_type, super()._save()]

    def _restore(self, own: Any) -> None:
        socket_type, below = own
        if socket_type is not None and not isinstance(socket_type, str):
            raise TypeError("a socket type is a text")
        super()._restore(below)
        self.socket_type = socket_type


def _socket_type(metadata: bytes) -> str | None:
    try:
        properties = parse_metadata(metadata)
    except MalformedFrame:
        return None
    names = {name.lower(): value for name, value in properties.items()}
    return names.get(PROPERTY_SOCKET_TYPE.lower(), b"").decode(errors="replace") or None
