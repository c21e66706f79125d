"""The table of the API's operations, and the OpenAPI document that is made from it."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from crosswire import __version__
from crosswire.web import damage, dead, ingest, log, messages, schedules, state
from crosswire.web.contract import ARROW, JSON, FailureResponse, Operation

__all__ = ["OPERATIONS", "openapi"]

OPERATIONS: Final = (
    Operation(
        name="show_state",
        method="GET",
        path="/v1/state",
        summary="The hub at a glance",
        handler=state.show_state,
        answer=state.HubState,
    ),
    Operation(
        name="show_damage",
        method="GET",
        path="/v1/damage",
        summary="What of the store is damaged and not acknowledged, and what is stopped by it",
        handler=damage.show_damage,
        answer=damage.DamageReport,
    ),
    Operation(
        name="acknowledge_damage",
        method="POST",
        path="/v1/damage/acknowledge",
        summary="Take what is damaged from the list; the hub is no longer shown as damaged",
        handler=damage.acknowledge_damage,
        answer=damage.AcknowledgedDamage,
    ),
    Operation(
        name="list_queues",
        method="GET",
        path="/v1/queues",
        summary="Queues, how much waits in them, and for whom",
        handler=state.list_queues,
        query=state.Names,
        answer=state.Queues,
    ),
    Operation(
        name="show_queue",
        method="GET",
        path="/v1/queues/{name:path}",
        summary="A queue, its consumers and, if asked for, some of its messages",
        handler=state.show_queue,
        query=state.Peek,
        answer=state.QueueDetail,
    ),
    Operation(
        name="purge_queue",
        method="POST",
        path="/v1/queues/{name:path}/purge",
        summary="Let everything in a queue go that no consumer holds",
        handler=state.purge_queue,
        answer=state.Purged,
    ),
    Operation(
        name="list_topics",
        method="GET",
        path="/v1/topics",
        summary="Topics and who subscribes to them",
        handler=state.list_topics,
        query=state.Names,
        answer=state.Topics,
    ),
    Operation(
        name="show_topic",
        method="GET",
        path="/v1/topics/{name:path}",
        summary="A topic and, if asked for, some of its stored messages",
        handler=state.show_topic,
        query=state.Peek,
        answer=state.TopicDetail,
    ),
    Operation(
        name="list_subscriptions",
        method="GET",
        path="/v1/subscriptions",
        summary="Named subscriptions and how far they are: one's own, administrators see all",
        handler=state.list_subscriptions,
        answer=state.SubscriptionList,
        needs="principal",
    ),
    Operation(
        name="assign_subscription",
        method="PATCH",
        path="/v1/subscriptions/{name:path}",
        summary="Give a named subscription that nobody uses to another user",
        handler=state.assign_subscription,
        query=state.SubscriptionOwner,
        body=state.NewOwner,
        answer=state.SubscriptionRow,
    ),
    Operation(
        name="remove_subscription",
        method="DELETE",
        path="/v1/subscriptions/{name:path}",
        summary="End a named subscription that nobody uses, for good",
        handler=state.remove_subscription,
        query=state.SubscriptionOwner,
        answer=state.Removed,
        needs="principal",
    ),
    Operation(
        name="list_services",
        method="GET",
        path="/v1/services",
        summary="Services and who provides them",
        handler=state.list_services,
        answer=state.ServiceRows,
    ),
    Operation(
        name="list_connections",
        method="GET",
        path="/v1/connections",
        summary="Who is connected, and what they take",
        handler=state.list_connections,
        query=state.ConnectionsQuery,
        answer=state.ConnectionList,
    ),
    Operation(
        name="close_connection",
        method="DELETE",
        path="/v1/connections/{id}",
        summary="Close a connection, with its protocol's goodbye",
        handler=state.close_connection,
        answer=state.Closed,
    ),
    Operation(
        name="produce",
        method="POST",
        path="/v1/messages",
        summary="Send to queues, publish to topics; answered when it is on disk",
        handler=messages.produce,
        body=messages.Productions,
        answer=messages.Produced,
        needs="principal",
    ),
    Operation(
        name="trace",
        method="GET",
        path="/v1/messages/{id:id}",
        summary="What happened to a message, step by step",
        handler=messages.trace,
        answer=messages.Trace,
    ),
    Operation(
        name="list_producers",
        method="GET",
        path="/v1/ingest",
        summary="Producers of batches, how far they are, and what waits for its commit",
        handler=ingest.list_producers,
        answer=ingest.ProducerRows,
    ),
    Operation(
        name="remove_producer",
        method="DELETE",
        path="/v1/ingest/{producer}",
        summary="Forget a producer and drop what it staged; its next batch may have any number",
        handler=ingest.remove_producer,
        query=ingest.OwnerQuery,
        answer=state.Removed,
    ),
    Operation(
        name="stage",
        method="POST",
        path="/v1/ingest/{producer}/{batch:id}/attempts/{attempt}",
        summary="Stage a part of an attempt to write a batch; answered when it is on disk",
        handler=ingest.stage,
        query=ingest.PartQuery,
        takes="arrow",
        answer=ingest.StageResponse,
        needs="principal",
    ),
    Operation(
        name="commit",
        method="POST",
        path="/v1/ingest/{producer}/{batch:id}/commit",
        summary="These attempts count: send and publish what they staged, once",
        handler=ingest.commit,
        body=ingest.CommitRequest,
        answer=ingest.CommitResponse,
        needs="principal",
    ),
    Operation(
        name="abort",
        method="POST",
        path="/v1/ingest/{producer}/{batch:id}/abort",
        summary="Drop what was staged of a batch",
        handler=ingest.abort,
        body=ingest.AbortRequest,
        answer=ingest.Aborted,
        needs="principal",
    ),
    Operation(
        name="list_logs",
        method="GET",
        path="/v1/log",
        summary="Destinations whose messages can be read in bulk, and how far they go",
        handler=log.list_logs,
        query=log.NamesQuery,
        answer=log.Logs,
        needs="principal",
    ),
    Operation(
        name="plan_log",
        method="POST",
        path="/v1/log/plan",
        summary="Where in the log messages are, in ranges to be read, and what of it is gone",
        handler=log.plan,
        body=log.ReadPlan,
        answer=log.LogRange,
        needs="principal",
    ),
    Operation(
        name="read_log",
        method="POST",
        path="/v1/log/read",
        summary="The messages of a range as an Arrow stream; `last` in a batch's metadata is its"
        " last id",
        handler=log.read,
        body=log.ReadSplit,
        answer=None,
        needs="principal",
    ),
    Operation(
        name="list_dead",
        method="GET",
        path="/v1/dead",
        summary="Where dead letters wait",
        handler=dead.list_dead,
        answer=dead.DeadQueues,
        needs="principal",
    ),
    Operation(
        name="list_letters",
        method="GET",
        path="/v1/dead/letters",
        summary="The dead letters of a queue or a named subscription",
        handler=dead.list_dead_letters,
        query=dead.DeadLettersQuery,
        answer=dead.DeadLetterRows,
        needs="principal",
    ),
    Operation(
        name="show_letter",
        method="GET",
        path="/v1/dead/letters/{id:id}",
        summary="A dead letter, whole, with every attempt to deliver it",
        handler=dead.show_dead_letter,
        query=dead.DeadLetterQuery,
        answer=dead.DeadLetterRow,
        needs="principal",
    ),
    Operation(
        name="edit_letter",
        method="PATCH",
        path="/v1/dead/letters/{id:id}",
        summary="Change a dead letter's payload or properties",
        handler=dead.edit_dead_letter,
        body=dead.Edit,
        answer=dead.DeadLetterRow,
        needs="principal",
    ),
    Operation(
        name="purge_letters",
        method="POST",
        path="/v1/dead/purge",
        summary="Let dead letters go",
        handler=dead.purge_dead_letters,
        body=dead.DeadLetterSelection,
        answer=dead.Chosen,
        needs="principal",
    ),
    Operation(
        name="replay_letters",
        method="POST",
        path="/v1/dead/replays",
        summary="Send dead letters again; answered after a few seconds, done or still running",
        handler=dead.replay_dead_letters,
        body=dead.ReplayRequest,
        answer=dead.ReplayRow,
        needs="principal",
    ),
    Operation(
        name="list_replays",
        method="GET",
        path="/v1/dead/replays",
        summary="Replays under way, and the last ones that ended",
        handler=dead.list_replays,
        answer=dead.ReplayRows,
        needs="principal",
    ),
    Operation(
        name="show_replay",
        method="GET",
        path="/v1/dead/replays/{id:id}",
        summary="How far a replay is",
        handler=dead.show_replay,
        answer=dead.ReplayRow,
        needs="principal",
    ),
    Operation(
        name="cancel_replay",
        method="DELETE",
        path="/v1/dead/replays/{id:id}",
        summary="Stop a replay; what it has not sent again stays",
        handler=dead.cancel_replay,
        answer=dead.ReplayRow,
        needs="principal",
    ),
    Operation(
        name="list_schedules",
        method="GET",
        path="/v1/schedules",
        summary="Schedules and when they fire next",
        handler=schedules.list_schedules,
        answer=schedules.ScheduleRows,
    ),
    Operation(
        name="show_schedule",
        method="GET",
        path="/v1/schedules/{id:path}",
        summary="A schedule and its next times",
        handler=schedules.show_schedule,
        query=schedules.PreviewQuery,
        answer=schedules.ScheduleRow,
    ),
    Operation(
        name="add_schedule",
        method="POST",
        path="/v1/schedules",
        summary="Add or replace a schedule",
        handler=schedules.add_schedule,
        body=schedules.NewSchedule,
        answer=schedules.ScheduleRow,
    ),
    Operation(
        name="preview_schedule",
        method="POST",
        path="/v1/schedules/preview",
        summary="When an interval or a cron expression would fire",
        handler=schedules.preview_schedule,
        body=schedules.PreviewRequest,
        answer=schedules.Preview,
    ),
    Operation(
        name="remove_schedule",
        method="DELETE",
        path="/v1/schedules/{id:path}",
        summary="Remove a schedule",
        handler=schedules.remove_schedule,
        answer=state.Removed,
    ),
)

_REFERENCES: Final = "#/components/schemas/{name}"


def openapi() -> dict[str, Any]:
    """The document for tools that make clients, or pages, from it."""
    bodies = [kind for each in OPERATIONS for kind in (each.answer, each.body) if kind is not None]
    _, schemas = msgspec.json.schema_components(
        [*bodies, FailureResponse], ref_template=_REFERENCES
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _describe(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Crosswire",
            "version": __version__,
            "description": "A hub's state, messages, dead letters and schedules.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _describe(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation.query)],
        "responses": {
            "200": _answer(operation),
            "default": _content("It could not be done", FailureResponse),
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, **_content("", operation.body)}
    elif operation.takes == "arrow":
        described["requestBody"] = {"required": True, "content": {ARROW: {}}}
    return described


def _answer(operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        return {"description": "Done", "content": {ARROW: {}}}
    return _content("Done", operation.answer)


def _content(description: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
    reference = {"$ref": _REFERENCES.format(name=kind.__name__)}
    content: dict[str, Any] = {"content": {JSON: {"schema": reference}}}
    return {"description": description, **content} if description else content


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer" if kind == ":id" else "string"},
        }
        for name, kind in re.findall(r"{(\w+)(:\w+)?}", path)
    ]


def _query_parameters(kind: type[msgspec.Struct] | None) -> list[dict[str, Any]]:
    if kind is None:
        return []
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]
    return [
        {"name": name, "in": "query", "required": name in schema["required"], "schema": field}
        for name, field in schema["properties"].items()
    ]
