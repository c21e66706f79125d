"""The protocol analyzer over HTTP: upload a capture, then read its connections and frames."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from crosswire.analyzer.analysis import AnalyzedConnection
from crosswire.analyzer.frame_filter import FrameFilter
from crosswire.analyzer.job import CaptureJob
from crosswire.analyzer.results import FrameStart, ResultReader
from crosswire.errors import InvalidInput, UnknownMessage
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.frame_rows import FrameDetail, FrameSummary, range_row, violation_row
from crosswire.web.held_analyses import HeldAnalysis
from crosswire.web.numbers import Id
from crosswire.web.paging import (
    ListQuery,
    NameQuery,
    SortKey,
    cursor_of,
    page_of,
    read_cursor,
)
from crosswire.web.times import Moment, at_s, at_us
from crosswire.wire.registry import PROTOCOL_NAMES

__all__ = ["ANALYSIS_OPERATIONS"]

_MOST_PORTS: Final = 64

ShortText = Annotated[str, msgspec.Meta(max_length=255)]
FilterText = Annotated[str, msgspec.Meta(max_length=1024)]


class AnalysisRow(msgspec.Struct, frozen=True, kw_only=True):
    """An analysis of a capture."""

    id: str
    """Its id, needed to read its frames."""
    name: str
    """The name of the file, as it was given."""
    state: Literal["receiving", "waiting", "running", "ready", "failed"]
    """`ready` when its frames can be read; `failed` with an `error`."""
    error: str
    """Why it can't be read; empty if it can."""
    notes: list[str]
    """What is missing or damaged in it."""
    size_bytes: int
    """The size of the capture."""
    created: Moment
    expires: Moment
    """When it is removed, unless it is used before."""
    frames: dict[str, int]
    """How many there are, by the name of the frame; empty until it is ready."""
    protocols: dict[str, int]
    """How many frames there are, by protocol."""
    violations: int
    """How many violations there are."""


class AnalysisRows(msgspec.Struct, frozen=True):
    """A page of the analyses of the user."""

    analyses: list[AnalysisRow]
    """Those that are held."""
    next: str
    """The cursor of the next page; empty after the last."""


class AnalysesQuery(NameQuery, frozen=True, kw_only=True):
    """A page of analyses, by default the newest first."""

    sort: Literal["newest", "name", "size"] = "newest"
    """By what the list is sorted: `size` begins with the largest."""


class RemovedAnalysis(msgspec.Struct, frozen=True):
    """What was removed."""

    removed: str
    """The id of the analysis."""


class AnalysisQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a capture."""

    name: ShortText = ""
    """The name of the file, for display."""
    protocol: Literal["", "emp", "emqp", "relink", "epoxy", "micromsg2"] = ""
    """For raw bytes of one direction: their protocol. By default it is recognized."""
    sender: ShortText = ""
    """For raw bytes: the role that sent them; by default the side that connects."""
    late: bool = False
    """For raw bytes: whether they begin inside of a connection."""
    ports: FilterText = ""
    """Ports that are not the default ones, such as `7000=emp,7001=relink`."""


class CapturedConnectionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A connection of a capture."""

    number: int
    """Its number in the capture, from 1."""
    name: str
    """`CLIENT:PORT-SERVER:PORT@SECONDS`."""
    protocol: str
    """Empty if it was not recognized, `tls` if it is encrypted."""
    listener: str
    """The hub's listener with this port by default; empty for other ports."""
    client: str
    """Address and port of the side that connected."""
    server: str
    """Address and port of the side that accepted."""
    first: Moment | None
    """When its first packet was captured; null for raw bytes."""
    last: Moment | None
    """When its last packet was captured; null for raw bytes."""
    frames: int
    """Valid frames."""
    violations: int
    """Frames, or bytes in no frame, that violate the protocol."""
    forward_bytes: int
    """Bytes from the side that connected."""
    backward_bytes: int
    """Bytes from the side that accepted."""
    missing_bytes: int
    """Bytes that the capture lacks."""
    unread_bytes: int
    """Bytes of incomplete frames, and after violations that hide where the next frame begins."""
    late: bool
    """Whether its beginning was not captured."""
    end: str
    """`open`, `closed` or `reset`."""


class CapturedConnectionRows(msgspec.Struct, frozen=True):
    """A page of a capture's connections."""

    connections: list[CapturedConnectionRow]
    """In the order of their first packets."""
    next: str
    """The cursor of the next page; empty after the last."""


class FramesQuery(ListQuery, frozen=True, kw_only=True):
    """A page of frames."""

    connection: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    """Only frames of the connection with this number."""
    protocol: ShortText = ""
    """Only frames of this protocol."""
    frame: ShortText = ""
    """Only frames with this name."""
    destination: FilterText = ""
    """Only frames whose destination contains this."""
    conversation: FilterText = ""
    """Only frames of this conversation; give its connection, too, unless it begins with `=`."""
    text: FilterText = ""
    """Only frames whose fields or bytes contain this, in any case."""
    violations: bool = False
    """Only violations."""
    after: Id = 0
    """Only frames after the one with this number; a cursor has precedence."""


class FramePage(msgspec.Struct, frozen=True):
    """A page of frames."""

    frames: list[FrameSummary]
    """In the order of the capture."""
    next: str
    """The cursor of the next page; empty after the last."""


async def create_analysis(ask: OperationRequest) -> AnalysisRow:
    """Upload a capture (pcap or pcapng, plain or compressed by gzip or zstd), or the raw bytes of
    one direction of a connection. It is read in the background, in a process with limits of memory
    and time, and held for its user for 15 minutes after it was last used. Any user may do this, and
    sees his own analyses only. Secrets in it are masked. Raises InvalidInput, ServiceUnavailable.
    """
    query: AnalysisQuery = ask.query
    job = CaptureJob(
        path="",
        name="",
        results="",
        protocol=query.protocol,
        sender=query.sender,
        is_late=query.late,
        ports=_ports(query.ports),
    )
    return _row(await ask.analyses.receive(ask.body, ask.principal, job, query.name))


def _ports(text: str) -> dict[int, str]:
    ports: dict[int, str] = {}
    for entry in text.split(",") if text else ():
        port, _, name = entry.strip().partition("=")
        is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535
        if not is_port or name not in PROTOCOL_NAMES or len(ports) >= _MOST_PORTS:
            raise InvalidInput(f"{entry[:80]!r} is not PORT=PROTOCOL")
        ports[int(port)] = name
    return ports


async def list_analyses(ask: OperationRequest) -> AnalysisRows:
    """A page of the analyses of the user that are held."""
    query: AnalysesQuery = ask.query

    def key(held: HeldAnalysis) -> SortKey | None:
        if query.contains not in held.name:
            return None
        if query.sort == "name":
            return 0.0, f"{held.name}\0{held.id}"
        return -(held.size_bytes if query.sort == "size" else held.created_at), held.id

    async with ask.work.turn() as turn:
        page, following = await page_of(ask.analyses.of(ask.principal), key, query, turn)
    return AnalysisRows([_row(each) for each in page], following)


def show_analysis(ask: OperationRequest) -> AnalysisRow:
    """An analysis of the user: poll it until it is `ready` or `failed`. Raises UnknownMessage."""
    return _row(ask.analyses.get(ask.path["id"], ask.principal))


def remove_analysis(ask: OperationRequest) -> RemovedAnalysis:
    """Remove an analysis of the user. Raises UnknownMessage."""
    ask.analyses.remove(ask.path["id"], ask.principal)
    return RemovedAnalysis(ask.path["id"])


async def list_captured_connections(ask: OperationRequest) -> CapturedConnectionRows:
    """A page of the connections in a capture. Raises UnknownMessage, InvalidInput."""
    query: ListQuery = ask.query
    reader = _reader(ask)
    after = _after(query.cursor)
    rows = await ask.analyses.in_thread(reader.connections, after, query.limit + 1)
    page = rows[: query.limit]
    following = cursor_of(page[-1].number) if len(rows) > query.limit else ""
    return CapturedConnectionRows([_connection(each) for each in page], following)


async def list_captured_frames(ask: OperationRequest) -> FramePage:
    """A page of the frames in a capture, in its order. Raises UnknownMessage, InvalidInput."""
    query: FramesQuery = ask.query
    reader = _reader(ask)
    chosen = FrameFilter(
        connection=query.connection,
        protocol=query.protocol,
        frame=query.frame,
        destination=query.destination,
        conversation=query.conversation,
        text=query.text,
        violations=query.violations,
    )
    after = _after(query.cursor) or query.after
    rows = await ask.analyses.in_thread(reader.frames, chosen, after, query.limit + 1)
    page = rows[: query.limit]
    following = cursor_of(page[-1].number) if len(rows) > query.limit else ""
    return FramePage([FrameSummary(**_summary(each)) for each in page], following)


async def show_captured_frame(ask: OperationRequest) -> FrameDetail:
    """A frame of a capture with its fields, its bytes, and which bytes hold which field. Raises
    UnknownMessage, InvalidInput."""
    found = await ask.analyses.in_thread(_reader(ask).frame, ask.path["number"])
    if found is None:
        raise UnknownMessage(f"there is no frame {ask.path['number']}")
    content = found.content
    return FrameDetail(
        **_summary(found),
        fields=msgspec.json.decode(content.fields),
        hex=content.data.hex(),
        masked=content.is_masked,
        ranges=[range_row(*each) for each in content.ranges],
    )


def _reader(ask: OperationRequest) -> ResultReader:
    held = ask.analyses.get(ask.path["id"], ask.principal)
    if held.state == "failed":
        raise InvalidInput(held.error)
    if held.state != "ready":
        raise InvalidInput("the analysis is not ready yet")
    return ResultReader(held.results)


def _after(cursor: str) -> int:
    after: tuple[int] | None = read_cursor(cursor, tuple[int])
    return 0 if after is None else min(max(after[0], 0), (1 << 63) - 1)


def _summary(frame: FrameStart) -> dict[str, Any]:
    violation = frame.violation
    return {
        "number": frame.number,
        "connection": str(frame.connection),
        "protocol": frame.protocol,
        "time": at_us(frame.time_us) if frame.time_us else None,
        "direction": "forward" if frame.is_forward else "backward",
        "sender": frame.sender,
        "offset": frame.offset,
        "length": frame.length,
        "layer": frame.layer,
        "frame": frame.frame,
        "destination": frame.destination,
        "conversation": frame.conversation,
        "violation": None if violation is None else violation_row(violation),
        "summary": frame.summary,
    }


def _connection(each: AnalyzedConnection) -> CapturedConnectionRow:
    return CapturedConnectionRow(
        number=each.number,
        name=each.name,
        protocol=each.protocol,
        listener=each.listener,
        client=each.client,
        server=each.server,
        first=at_us(each.first_us) if each.first_us else None,
        last=at_us(each.last_us) if each.last_us else None,
        frames=each.frames,
        violations=each.violations,
        forward_bytes=each.forward_bytes,
        backward_bytes=each.backward_bytes,
        missing_bytes=each.missing_bytes,
        unread_bytes=each.unread_bytes,
        late=each.is_late,
        end=each.end,
    )


def _row(held: HeldAnalysis) -> AnalysisRow:
    return AnalysisRow(
        id=held.id,
        name=held.name,
        state=held.state,
        error=held.error,
        notes=held.notes,
        size_bytes=held.size_bytes,
        created=at_s(held.created_at),
        expires=at_s(held.expires_at),
        frames=held.frames,
        protocols=held.protocols,
        violations=held.violations,
    )


ANALYSIS_OPERATIONS: Final = (
    Operation(
        name="create_analysis",
        tag="analyzer",
        method="POST",
        path="/v1/analyses",
        summary="Upload a capture and have it decoded",
        handler=create_analysis,
        query=AnalysisQuery,
        takes="bytes",
        answer=AnalysisRow,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="list_analyses",
        tag="analyzer",
        method="GET",
        path="/v1/analyses",
        summary="Your analyses",
        handler=list_analyses,
        query=AnalysesQuery,
        answer=AnalysisRows,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="show_analysis",
        tag="analyzer",
        method="GET",
        path="/v1/analyses/{id}",
        summary="An analysis and its state",
        handler=show_analysis,
        answer=AnalysisRow,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="remove_analysis",
        tag="analyzer",
        method="DELETE",
        path="/v1/analyses/{id}",
        summary="Remove an analysis",
        handler=remove_analysis,
        answer=RemovedAnalysis,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="list_captured_connections",
        tag="analyzer",
        method="GET",
        path="/v1/analyses/{id}/connections",
        summary="The connections in a capture",
        handler=list_captured_connections,
        query=ListQuery,
        answer=CapturedConnectionRows,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="list_captured_frames",
        tag="analyzer",
        method="GET",
        path="/v1/analyses/{id}/frames",
        summary="The frames in a capture, filtered",
        handler=list_captured_frames,
        query=FramesQuery,
        answer=FramePage,
        needs="principal",
        on_standby=True,
    ),
    Operation(
        name="show_captured_frame",
        tag="analyzer",
        method="GET",
        path="/v1/analyses/{id}/frames/{number:id}",
        summary="A frame of a capture, with its bytes and where its fields are",
        handler=show_captured_frame,
        answer=FrameDetail,
        needs="principal",
        on_standby=True,
    ),
)
