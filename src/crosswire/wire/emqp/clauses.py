"""The clauses of eMQP's specification that violations break, by their reasons."""

from __future__ import annotations

from typing import Final

from crosswire.wire.clauses import ClauseTable, is_a

__all__ = ["CLAUSES"]

_GLOBAL: Final = "eMQP, Global Frames"
_SCHEDULE: Final = "eMQP, eMQP / Client: SCHEDULE"

CLAUSES: Final[ClauseTable] = (
    (r"a command has at least|not a command|its version is not|its first frame is not", _GLOBAL),
    (r"command .* is not defined", _GLOBAL),
    (r"(SCHEDULE|UNSCHEDULE) has|a schedule without", _SCHEDULE),
    (r"(REQUEST|PUBLISH) has (at least|a frame)", "eMQP, eMQP / Client"),
    (r"(INFORM|READY) has (at least|a frame)", "eMQP, eMQP / Worker"),
    (r"\S+ has at least \d+ frames", _GLOBAL),
    (r"\S+ has \d+ or \d+ frames", _SCHEDULE),
    (r"\S+ has a frame that is not UTF-8", "ruling, eMQP: Text"),
    (r"a topic is not UTF-8", "ruling, eMQP: Text"),
    (r"a publication has", "eMQP, eMQP / Publisher"),
    (r"queues are not pairs|a queue without a name", "eMQP, eMQP / Worker: INFORM"),
    (r"a list of queues of|\S+ has headers of|headers of", is_a("emqp.header_bytes")),
    (r"\S+ has a name of|a name of|\S+ has \d+$", is_a("emqp.name_bytes")),
    (r"a worker's reply that names no request", "ruling, eMQP: frame counts"),
    (r"only a \S+ can register here", "eMQP, Topology"),
    (r"unexpected command: \S+ at", "eMQP, Topology"),
    (r"the peer was silent", "eMQP, Heartbeating"),
)
