"""The clauses of Epoxy's specification that violations break, by their reasons."""

from __future__ import annotations

from typing import Final

from crosswire.wire.clauses import ClauseTable, is_a

__all__ = ["CLAUSES", "CONTENT"]

CLAUSES: Final[ClauseTable] = (
    (r"a frame without framelets|framelets .* don't make a frame", "Epoxy, The frame"),
    (r"framelet type \S+ is not defined", "Epoxy, Unknown framelets"),
    (r"a framelet without content", "Epoxy, Framelets"),
    (r"a frame of \d+ framelets, more than", is_a("epoxy.framelets")),
    (r"a framelet of \d+ bytes, more than", is_a("epoxy.framelet_bytes")),
    (r"a frame of more than the \d+ bytes", is_a("epoxy.frame_bytes")),
    (r"a frame of more than \d+ bytes, from a peer", "ruling, unidentified peers"),
    (r"message type \S+ is not supported", "Epoxy, Message type"),
    (r"conversation id \S+ can't be used", "Epoxy, Conversation ID"),
    (r"unexpected frame: \S+", "Epoxy, Establishing a connection"),
    (r"no config in time", is_a("epoxy.handshake_s")),
)

CONTENT: Final = "Epoxy, Framelet structures"
"""Of Bond's errors about the content of a config, of headers or of a protocol error."""
