"""The clauses of MicroMsg2's specification that violations break, by their reasons."""

from __future__ import annotations

from typing import Final

from crosswire.wire.clauses import ClauseTable, is_a

__all__ = ["CLAUSES"]

_NEGOTIATION: Final = "MicroMsg2, Extension negotiation"
_MESSAGE: Final = "MicroMsg2, MESSAGE frame"
_COMMAND: Final = "MicroMsg2, COMMAND frame"
_EXTENSION: Final = "MicroMsg2, EXTENSION frame"
_ACKS: Final = "MicroMsg2, batch-ack"
_FIELD: Final = "MicroMsg2, Definitions"

CLAUSES: Final[ClauseTable] = (
    (r"frame flags \d+ are not defined together", "MicroMsg2, Frame prefix"),
    (r"only a message can be continued", "MicroMsg2, Frame prefix"),
    (r"a payload of \d+ bytes, more than", _MESSAGE),
    (r"sequence number \d+( where|$)|a message between the frames", _MESSAGE),
    (r"a message without a destination|a destination is not UTF-8", _MESSAGE),
    (r"property .* has no value", "MicroMsg2, Example properties"),
    (r"extension number \d+ was not agreed", "MicroMsg2, Handshake completed"),
    (r"extension \S+ has no frames", _EXTENSION),
    (r"an identity that is not ASCII|version \d+\.\d+ is not supported", "MicroMsg2, Handshake"),
    (r"\S+ in state", "MicroMsg2, Handshake"),
    (r"required but left out|not supported:|batch-ack's max-count", _NEGOTIATION),
    (r"\S+ needs the extension", "MicroMsg2, PUB/SUB"),
    (r"a command without a destination|a window (that|is)", "MicroMsg2, SUBSCRIBE frame"),
    (r"command \S+ (is not defined|from a server)|.* is no key and value", _COMMAND),
    (r"an acknowledgement of|a refusal of|more than \d+ frames without waiting", _ACKS),
    (r"a type name is not UTF-8", "MicroMsg2, DOTNET"),
    (r"a type's name of", is_a("micromsg2.type_bytes")),
    (r"a payload that is not JSON", "MicroMsg2, Extensions: json"),
    (r".* is no name for|an empty name for", _FIELD),
    (r"a % that is not|escapes that are not UTF-8|text is not UTF-8", _FIELD),
    (r"a list of \d+ items|a command of \d+ bytes", "hub limit, 1,000 items and 64 KiB of text"),
    (r"a message of more than", is_a("micromsg2.message_bytes")),
    (r"more than \d+ properties", is_a("micromsg2.properties")),
    (r"no handshake in time", is_a("micromsg2.handshake_s")),
)
