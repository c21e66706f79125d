"""Dead letters over HTTP: edit, delete, or replay at a rate."""

from __future__ import annotations

import asyncio
from typing import Final, Literal

import msgspec

from crosswire.envelope import Property
from crosswire.errors import UnknownMessage
from crosswire.gateways.edits import refit
from crosswire.gateways.payloads import JsonPayload, from_body
from crosswire.store.keys import MAX_ID
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.dead_lists import (
    DeadLetterRow,
    dead_letter_row,
    may_use_letters,
    usable_dead_queue,
)
from crosswire.web.dead_selection import (
    LISTED_IDS,
    DeadLetterSelection,
    dead_destination,
    selected_ids,
)
from crosswire.web.paging import (
    ListQuery,
    SortKey,
    page_of,
)
from crosswire.web.property_filter import property_predicate
from crosswire.web.replays import Replay, ReplayRequest, ReplayRow, ReplayRows

__all__ = ["DEAD_OPERATIONS"]


# --------------------------------------------------------------------------------------- editing


class Edit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that are given replace those of the letter; at most one of `json`, `text` and `base64`
    may be given."""

    queue: str
    """The queue, or named subscription, that it comes from."""
    json: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: str | None = None
    base64: str | None = None
    content_type: str | None = None
    properties: dict[str, Property] | None = None


async def edit_dead_letter(ask: OperationRequest) -> DeadLetterRow:
    """Change a letter; answered after the commit. Raises UnknownMessage and InvalidEnvelope."""
    edit: Edit = ask.body
    payload, content_type = None, edit.content_type
    if (edit.json, edit.text, edit.base64) != (msgspec.UNSET, None, None):
        payload, kind = from_body(JsonPayload(edit.json, edit.text, edit.base64))
        content_type = content_type or kind
    dead_letter = ask.hub.dead_letters.edit(
        usable_dead_queue(ask, edit.queue),
        ask.path["id"],
        payload=payload,
        properties=edit.properties,
        content_type=content_type,
        refit=refit,
    )
    await ask.hub.committed()
    return dead_letter_row(edit.queue, dead_letter, whole=True)


# -------------------------------------------------------------------------------------- deleting


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """What was selected and deleted."""

    matched: int
    """How many letters were selected."""
    done: int
    """How many were deleted."""
    ids: list[int]
    """The first that were selected."""
    dry_run: bool


async def purge_dead_letters(ask: OperationRequest) -> Chosen:
    """Delete letters; answered after the commit. Raises InvalidEnvelope and UnknownMessage."""
    choice: DeadLetterSelection = ask.body
    choice.check()
    hub = ask.hub
    queue = usable_dead_queue(ask, choice.queue)
    matched = done = 0
    first: list[int] = []
    if choice.all and not choice.dry_run:
        # Moves the cursor, without reading the letters.
        letters = hub.queue(queue)
        matched = letters.length
        letters.purge(ask.now())
        await hub.committed()
        done = max(matched - letters.length, 0)
        return Chosen(matched=matched, done=done, ids=[], dry_run=False)
    for ids in selected_ids(hub, queue, choice, property_predicate(choice.filter)):
        matched += len(ids)
        first += ids[: LISTED_IDS - len(first)]
        if not choice.dry_run:
            done += len(hub.dead_letters.purge(queue, ids, ask.now()))
        await asyncio.sleep(0)
    await hub.committed()
    return Chosen(matched=matched, done=done, ids=first, dry_run=choice.dry_run)


# -------------------------------------------------------------------------------------- replaying


async def replay_dead_letters(ask: OperationRequest) -> ReplayRow:
    """Start a replay; answered when it ends, or after a few seconds."""
    asked: ReplayRequest = ask.body
    usable_dead_queue(ask, asked.queue)
    if asked.destination and not ask.is_administrator:
        ask.require("produce", asked.destination)

    def is_allowed() -> bool:
        # A reload may take away what it was started with.
        if not ask.is_identified or not may_use_letters(ask, dead_destination(asked.queue)):
            return False
        access = ask.server.context.access
        return (
            not asked.destination
            or ask.is_administrator
            or access.may(ask.principal, "produce", asked.destination)
        )

    return await ask.replays.start(ask.hub, asked, ask.now, ask.principal, is_allowed=is_allowed)


class ReplaysQuery(ListQuery, frozen=True, kw_only=True):
    """A page of replays and moves, by default the newest first."""

    sort: Literal["newest", "source", "state", "matched", "replayed", "skipped"] = "newest"
    """By what the list is sorted: by counts the largest comes first."""
    state: Literal["", "running", "done", "cancelled", "failed"] = ""
    """Only those in this state."""
    contains: str = ""
    """Only those whose source or destination contains this."""


async def list_replays(ask: OperationRequest) -> ReplayRows:
    """A page of running replays, and the last ones that ended: of all for administrators, their
    own for others."""
    query: ReplaysQuery = ask.query

    def key(replay: ReplayRow) -> SortKey | None:
        if query.state not in ("", replay.state):
            return None
        if query.contains not in replay.source and query.contains not in replay.destination:
            return None
        newest = f"{MAX_ID - replay.id:020}"
        counts = {
            "matched": replay.matched,
            "replayed": replay.replayed,
            "skipped": replay.skipped,
        }
        texts = {"source": replay.source, "state": replay.state}
        if query.sort in texts:
            return 0.0, f"{texts[query.sort]}\0{newest}"
        return -counts.get(query.sort, 0), newest

    rows = [each.row() for each in ask.replays.all() if _is_visible(ask, each)]
    async with ask.work.turn() as turn:
        page, following = await page_of(rows, key, query, turn)
    return ReplayRows(page, following)


def _is_visible(ask: OperationRequest, replay: Replay) -> bool:
    return ask.is_administrator or replay.principal == ask.principal


def _replay(ask: OperationRequest) -> Replay:
    """The replay that the path names. Raises UnknownMessage, also for one of another user."""
    replay = ask.replays.get(ask.path["id"])
    if not _is_visible(ask, replay):
        raise UnknownMessage(f"there is no replay {replay.id}")
    return replay


def show_replay(ask: OperationRequest) -> ReplayRow:
    """The state of a replay. Raises UnknownMessage."""
    return _replay(ask).row()


async def cancel_replay(ask: OperationRequest) -> ReplayRow:
    """Cancel a replay, and wait for its end. Raises UnknownMessage."""
    replay = _replay(ask)
    if replay.task is not None:
        replay.task.cancel()
        await asyncio.wait([replay.task])
    return replay.row()


DEAD_OPERATIONS: Final = (
    Operation(
        name="edit_letter",
        tag="dead letters",
        method="PATCH",
        path="/v1/dead/letters/{id:id}",
        summary="Change a dead letter's payload or properties",
        handler=edit_dead_letter,
        body=Edit,
        answer=DeadLetterRow,
        needs="principal",
        body_bytes=None,
    ),
    Operation(
        name="purge_letters",
        tag="dead letters",
        method="POST",
        path="/v1/dead/purge",
        summary="Delete dead letters",
        handler=purge_dead_letters,
        body=DeadLetterSelection,
        answer=Chosen,
        needs="principal",
    ),
    Operation(
        name="replay_letters",
        tag="dead letters",
        method="POST",
        path="/v1/dead/replays",
        summary="Send dead letters again; answered when done, or after a few seconds",
        handler=replay_dead_letters,
        body=ReplayRequest,
        answer=ReplayRow,
        needs="principal",
    ),
    Operation(
        name="list_replays",
        tag="dead letters",
        method="GET",
        path="/v1/dead/replays",
        summary="Running replays, and the last ones that ended",
        handler=list_replays,
        query=ReplaysQuery,
        answer=ReplayRows,
        needs="principal",
    ),
    Operation(
        name="show_replay",
        tag="dead letters",
        method="GET",
        path="/v1/dead/replays/{id:id}",
        summary="State of a replay",
        handler=show_replay,
        answer=ReplayRow,
        needs="principal",
    ),
    Operation(
        name="cancel_replay",
        tag="dead letters",
        method="DELETE",
        path="/v1/dead/replays/{id:id}",
        summary="Cancel a replay; letters that were not sent again are kept",
        handler=cancel_replay,
        answer=ReplayRow,
        needs="principal",
    ),
)
