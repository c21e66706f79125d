"""Checkpoints over HTTP: an administrator, or another replica, has one made, fetches its files, and
removes it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Literal

import msgspec

from crosswire.errors import NotLeading, StoreFailed, UnknownMessage
from crosswire.server.checkpoints import Checkpoints, LiveCheckpoint
from crosswire.store.checkpoint import Checkpoint
from crosswire.web.contract import BYTES, Chunks, Operation, OperationRequest
from crosswire.web.numbers import Id
from crosswire.web.paging import ListQuery, SortKey, cursor_of, page_of, read_cursor
from crosswire.web.times import Moment, at_s

__all__ = ["CHECKPOINT_OPERATIONS"]

_CHUNK_BYTES: Final = 1 << 20


class CheckpointFileRow(msgspec.Struct, frozen=True):
    """A file of a checkpoint's store."""

    name: str
    size_bytes: int
    sha256: str
    """The SHA-256 of its bytes, in hex."""


class CheckpointStore(msgspec.Struct, frozen=True, kw_only=True):
    """The copied store."""

    node: str
    group: int
    """The number of the last commit group in it."""
    newest_id: int
    """The newest id that had been given out by then."""
    next_row: int
    """The number of the next row of the ledger."""


class LakeSize(msgspec.Struct, frozen=True):
    """How much of the lake belongs to the checkpoint."""

    files: int
    size_bytes: int


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint."""

    id: str
    state: Literal["running", "ready", "failed"]
    """`running` while it is made; `failed` with an `error`."""
    error: str
    """Why it could not be made; empty if it could."""
    created: Moment
    store: CheckpointStore | None
    """Null while it is made."""
    files: list[CheckpointFileRow]
    """The files of the store."""
    lake: LakeSize
    """The files of the lake that belong to it."""


class CheckpointRows(msgspec.Struct, frozen=True):
    """A page of the checkpoints; there are four at most."""

    checkpoints: list[CheckpointRow]
    """The oldest first."""
    next: str
    """The cursor of the next page; empty after the last."""


class LakeCopyRow(msgspec.Struct, frozen=True):
    """A file of the lake."""

    name: str
    """Its path inside the lake."""
    size_bytes: int


class LakeCopyRows(msgspec.Struct, frozen=True):
    """A page of the lake's files that belong to a checkpoint."""

    files: list[LakeCopyRow]
    """In the order of their names."""
    next: str
    """The cursor of the next page; empty after the last."""


class FileQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Where to begin."""

    offset: Id = 0
    """The first byte: who was interrupted continues there."""


class RemovedCheckpoint(msgspec.Struct, frozen=True):
    """What was removed."""

    removed: str
    """The id of the checkpoint."""


def create_checkpoint(ask: OperationRequest) -> CheckpointRow:
    """Begin to make a checkpoint of the store and of the lake's files that belong to it.

    Raises DestinationFull, StoreFailed and NotLeading.
    """
    return _row(_checkpoints(ask).create())


async def list_checkpoints(ask: OperationRequest) -> CheckpointRows:
    """A page of them."""
    query: ListQuery = ask.query

    def key(live: LiveCheckpoint) -> SortKey:
        return live.created_at, live.id

    async with ask.work.turn() as turn:
        page, following = await page_of(_checkpoints(ask).all(), key, query, turn)
    return CheckpointRows([_row(each) for each in page], following)


def show_checkpoint(ask: OperationRequest) -> CheckpointRow:
    """One of them. Raises UnknownMessage."""
    return _row(_checkpoints(ask).get(ask.path["id"]))


def remove_checkpoint(ask: OperationRequest) -> RemovedCheckpoint:
    """Remove one that is made. Raises UnknownMessage and DestinationFull."""
    _checkpoints(ask).remove(ask.path["id"])
    return RemovedCheckpoint(ask.path["id"])


def list_lake_copies(ask: OperationRequest) -> LakeCopyRows:
    """A page of the lake's files that belong to a checkpoint. Raises UnknownMessage."""
    query: ListQuery = ask.query
    live = _checkpoints(ask).get(ask.path["id"])
    after: tuple[int] | None = read_cursor(query.cursor, tuple[int])
    start = max(after[0], 0) if after is not None else 0
    page = live.lake[start : start + query.limit]
    end = start + len(page)
    return LakeCopyRows(
        [LakeCopyRow(each.name, each.size_bytes) for each in page],
        cursor_of(end) if end < len(live.lake) else "",
    )


async def read_checkpoint_file(ask: OperationRequest) -> Chunks:
    """The bytes of a file, `store/NAME` or `lake/PATH`, from an offset on.

    Raises UnknownMessage and StoreFailed.
    """
    query: FileQuery = ask.query
    checkpoints, identifier = _checkpoints(ask), ask.path["id"]
    path = _path(checkpoints.get(identifier), ask.path["file"])
    try:
        with path.open("rb") as file:
            file.seek(query.offset)
            while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield chunk
                # A reload may have taken the right away; and it is in use as long as it is read.
                if not ask.is_identified or not ask.is_replica:
                    raise StoreFailed("the right to read it was taken away")
                checkpoints.get(identifier)
    except FileNotFoundError:
        raise UnknownMessage(f"{ask.path['file']} is gone") from None
    except OSError as error:
        raise StoreFailed(f"{ask.path['file']} can't be read: {error.strerror}") from error


def _checkpoints(ask: OperationRequest) -> Checkpoints:
    """Raises NotLeading on a standby."""
    if ask.server.checkpoints is None or not ask.server.is_leading:
        raise NotLeading("a standby has no checkpoints of store and lake: ask the leader")
    return ask.server.checkpoints


def _path(live: LiveCheckpoint, name: str) -> Path:
    """Only names that are listed are files of it: a path never leaves its folder."""
    kind, _, own = name.partition("/")
    if kind == "store" and live.checkpoint is not None:
        if any(each.name == own for each in live.checkpoint.files):
            return live.folder / own
    elif kind == "lake":
        path = live.lake_paths.get(own)
        if path is not None:
            return path
    raise UnknownMessage(f"checkpoint {live.id} has no file {name!r}")


def _row(live: LiveCheckpoint) -> CheckpointRow:
    sizes = [each.size_bytes for each in live.lake]
    return CheckpointRow(
        id=live.id,
        state=live.state,
        error=live.error,
        created=at_s(live.created_at),
        store=None if live.checkpoint is None else _store(live.checkpoint),
        files=[] if live.checkpoint is None else _files(live.checkpoint),
        lake=LakeSize(len(sizes), sum(sizes)),
    )


def _store(checkpoint: Checkpoint) -> CheckpointStore:
    return CheckpointStore(
        node=checkpoint.node,
        group=checkpoint.group,
        newest_id=checkpoint.newest_id,
        next_row=checkpoint.next_row,
    )


def _files(checkpoint: Checkpoint) -> list[CheckpointFileRow]:
    return [CheckpointFileRow(each.name, each.size_bytes, each.sha256) for each in checkpoint.files]


CHECKPOINT_OPERATIONS: Final = (
    Operation(
        name="create_checkpoint",
        tag="storage",
        needs="replicate",
        method="POST",
        path="/v1/checkpoints",
        summary="Make a checkpoint of store and lake, to be fetched file by file",
        handler=create_checkpoint,
        answer=CheckpointRow,
    ),
    Operation(
        name="list_checkpoints",
        tag="storage",
        needs="replicate",
        method="GET",
        path="/v1/checkpoints",
        summary="Checkpoints that are being made or can be fetched",
        handler=list_checkpoints,
        query=ListQuery,
        answer=CheckpointRows,
    ),
    Operation(
        name="show_checkpoint",
        tag="storage",
        needs="replicate",
        method="GET",
        path="/v1/checkpoints/{id}",
        summary="A checkpoint, and the files of its store with their checksums",
        handler=show_checkpoint,
        answer=CheckpointRow,
    ),
    Operation(
        name="list_lake_copies",
        tag="storage",
        needs="replicate",
        method="GET",
        path="/v1/checkpoints/{id}/lake",
        summary="The files of the lake that belong to a checkpoint",
        handler=list_lake_copies,
        query=ListQuery,
        answer=LakeCopyRows,
    ),
    Operation(
        name="read_checkpoint_file",
        tag="storage",
        needs="replicate",
        method="GET",
        path="/v1/checkpoints/{id}/files/{file:path}",
        summary="The bytes of a checkpoint's file, `store/NAME` or `lake/PATH`",
        handler=read_checkpoint_file,
        query=FileQuery,
        answer=None,
        streams=BYTES,
    ),
    Operation(
        name="remove_checkpoint",
        tag="storage",
        needs="replicate",
        method="DELETE",
        path="/v1/checkpoints/{id}",
        summary="Remove a checkpoint; one that nobody uses is removed after ten minutes",
        handler=remove_checkpoint,
        answer=RemovedCheckpoint,
    ),
)
