"""The clauses of ZMTP's RFCs that violations break, by their reasons."""

from __future__ import annotations

from typing import Final

from crosswire.wire.clauses import ClauseTable, is_a

__all__ = ["CLAUSES"]

_GREETING: Final = "ZMTP RFC 37, Greeting"
_COMMANDS: Final = "ZMTP RFC 37, Commands"
_METADATA: Final = "ZMTP RFC 37, Metadata"
_CURVE: Final = "ZMTP RFC 26, CURVE"

CLAUSES: Final[ClauseTable] = (
    (r"not a greeting of ZeroMQ|a version before ZMTP 3", _GREETING),
    (r"the name of the mechanism|the mechanism is|both sides want", _GREETING),
    (r"a command without a whole name|a command's name is not ASCII", _COMMANDS),
    (r"a message during the handshake", "ZMTP RFC 37, Handshake"),
    (r"flags that nobody defined", "ZMTP RFC 37, Framing"),
    (r"metadata that is cut short|the name of a property|an identity of more than", _METADATA),
    (r"a \w+ does not go with", "ZMTP RFC 37, Socket types"),
    (r"a message of more than the \d+ parts", is_a("emqp.parts")),
    (r"a command of more than the \d+ bytes", is_a("emqp.command_bytes")),
    (r"a \w+ of more than the \d+ bytes", is_a("emqp.frame_bytes")),
    (r"a message with more bytes or parts", is_a("emqp.frame_bytes")),
    (r"more subscriptions than allowed", is_a("emqp.subscription_bytes")),
    (r"PING has a time to live", "ZMTP RFC 37, PING and PONG"),
    (r"silent for longer than its own PING|no sign of life", "ZMTP RFC 37, PING and PONG"),
    (r"a subscription to a", "ZMTP RFC 37, SUBSCRIBE and CANCEL"),
    (r"no handshake in time", is_a("emqp.handshake_s")),
    (r"unexpected frame|unexpected command: \S+ after the handshake", "ZMTP RFC 37, Handshake"),
    (r"the command .* in clear text|clear text in a CURVE connection", _CURVE),
    (r"a sealed frame without flags|a nonce that was used before|a box that does not open", _CURVE),
    (r"(WELCOME|HELLO) of \d+ bytes|version \d+\.\d+ of CURVE", _CURVE),
    (r"INITIATE with|a vouch for other keys", _CURVE),
    (r"the command .* must come", "ZMTP RFC 37, Security mechanisms"),
    (r"HELLO does not hold|a name or password that is not UTF-8", "ZMTP RFC 24, PLAIN"),
)
