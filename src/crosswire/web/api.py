"""The table of the API's operations, and the OpenAPI document generated from it.

Descriptions in the document are the summaries below and the docstrings of the structs.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from crosswire import __version__
from crosswire.web import (
    connections,
    damage,
    dead,
    dead_selection,
    ingest,
    log,
    messages,
    replays,
    schedules,
    state,
)
from crosswire.web.contract import ARROW, JSON, FailureResponse, Operation

__all__ = ["OPERATIONS", "openapi"]

OPERATIONS: Final = (
    Operation(
        name="show_state",
        method="GET",
        path="/v1/state",
        summary="Overview of the hub",
        handler=state.show_state,
        answer=state.HubState,
        needs="observe",
    ),
    Operation(
        name="show_damage",
        method="GET",
        path="/v1/damage",
        summary="Damage of the store that is not acknowledged, and what it stopped",
        handler=damage.show_damage,
        answer=damage.DamageReport,
        needs="observe",
    ),
    Operation(
        name="acknowledge_damage",
        method="POST",
        path="/v1/damage/acknowledge",
        summary="Acknowledge the damage; the hub is no longer reported as damaged",
        handler=damage.acknowledge_damage,
        answer=damage.AcknowledgedDamage,
    ),
    Operation(
        name="list_queues",
        method="GET",
        path="/v1/queues",
        summary="Queues, with their lengths, sizes and consumers",
        handler=state.list_queues,
        query=state.Names,
        answer=state.Queues,
        needs="principal",
    ),
    Operation(
        name="show_queue",
        method="GET",
        path="/v1/queues/{name:path}",
        summary="A queue, its consumers and, if requested, some of its messages",
        handler=state.show_queue,
        query=state.Peek,
        answer=state.QueueDetail,
        needs="principal",
    ),
    Operation(
        name="purge_queue",
        method="POST",
        path="/v1/queues/{name:path}/purge",
        summary="Delete all messages of a queue that no consumer holds",
        handler=state.purge_queue,
        answer=state.Purged,
    ),
    Operation(
        name="delete_queue",
        method="DELETE",
        path="/v1/queues/{name:path}",
        summary="Delete a queue that has no messages, consumers, schedules or configuration",
        handler=state.delete_queue,
        answer=state.Removed,
    ),
    Operation(
        name="list_topics",
        method="GET",
        path="/v1/topics",
        summary="Topics and their subscriptions",
        handler=state.list_topics,
        query=state.Names,
        answer=state.Topics,
        needs="principal",
    ),
    Operation(
        name="show_topic",
        method="GET",
        path="/v1/topics/{name:path}",
        summary="A topic and, if requested, some of its stored messages",
        handler=state.show_topic,
        query=state.Peek,
        answer=state.TopicDetail,
        needs="principal",
    ),
    Operation(
        name="delete_topic",
        method="DELETE",
        path="/v1/topics/{name:path}",
        summary="Delete a topic that has no messages, subscriptions, schedules or configuration",
        handler=state.delete_topic,
        answer=state.Removed,
    ),
    Operation(
        name="list_subscriptions",
        method="GET",
        path="/v1/subscriptions",
        summary="Named subscriptions with cursors and consumers: one's own, observers see all",
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
        summary="Delete a named subscription that has no consumers",
        handler=state.remove_subscription,
        query=state.SubscriptionOwner,
        answer=state.Removed,
        needs="principal",
    ),
    Operation(
        name="list_services",
        method="GET",
        path="/v1/services",
        summary="Services and their providers",
        handler=state.list_services,
        answer=state.ServiceRows,
        needs="principal",
    ),
    Operation(
        name="list_connections",
        method="GET",
        path="/v1/connections",
        summary="Connections, with what they consume and serve",
        handler=connections.list_connections,
        query=connections.ConnectionsQuery,
        answer=connections.ConnectionList,
        needs="principal",
    ),
    Operation(
        name="close_connection",
        method="DELETE",
        path="/v1/connections/{id}",
        summary="Close a connection, with its protocol's goodbye",
        handler=connections.close_connection,
        answer=connections.Closed,
    ),
    Operation(
        name="produce",
        method="POST",
        path="/v1/messages",
        summary="Send to queues and publish to topics; answered when durable messages are on disk",
        handler=messages.produce,
        body=messages.Productions,
        answer=messages.Produced,
        needs="principal",
        body_bytes=None,
        checks_numbers=True,
    ),
    Operation(
        name="trace",
        method="GET",
        path="/v1/messages/{id:id}",
        summary="What happened to a message, step by step",
        handler=messages.trace,
        answer=messages.Trace,
        needs="principal",
    ),
    Operation(
        name="list_producers",
        method="GET",
        path="/v1/ingest",
        summary="Producers of batches with their last commits, and what is staged",
        handler=ingest.list_producers,
        answer=ingest.ProducerRows,
        needs="observe",
    ),
    Operation(
        name="remove_producer",
        method="DELETE",
        path="/v1/ingest/{producer}",
        summary="Remove a producer and what it staged; its next batch may have any number",
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
        summary="Commit a batch: send and publish what these attempts staged, exactly once",
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
        summary="Destinations whose messages can be read in bulk, and the newest id",
        handler=log.list_logs,
        query=log.NamesQuery,
        answer=log.Logs,
        needs="principal",
    ),
    Operation(
        name="plan_log",
        method="POST",
        path="/v1/log/plan",
        summary="Plan a read of the log: ranges with messages, and ranges that are deleted",
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
        summary="Queues with dead letters",
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
        body_bytes=None,
    ),
    Operation(
        name="purge_letters",
        method="POST",
        path="/v1/dead/purge",
        summary="Delete dead letters",
        handler=dead.purge_dead_letters,
        body=dead_selection.DeadLetterSelection,
        answer=dead.Chosen,
        needs="principal",
    ),
    Operation(
        name="replay_letters",
        method="POST",
        path="/v1/dead/replays",
        summary="Send dead letters again; answered when done, or after a few seconds",
        handler=dead.replay_dead_letters,
        body=replays.ReplayRequest,
        answer=replays.ReplayRow,
        needs="principal",
    ),
    Operation(
        name="list_replays",
        method="GET",
        path="/v1/dead/replays",
        summary="Running replays, and the last ones that ended",
        handler=dead.list_replays,
        answer=replays.ReplayRows,
        needs="principal",
    ),
    Operation(
        name="show_replay",
        method="GET",
        path="/v1/dead/replays/{id:id}",
        summary="State of a replay",
        handler=dead.show_replay,
        answer=replays.ReplayRow,
        needs="principal",
    ),
    Operation(
        name="cancel_replay",
        method="DELETE",
        path="/v1/dead/replays/{id:id}",
        summary="Cancel a replay; letters that were not sent again are kept",
        handler=dead.cancel_replay,
        answer=replays.ReplayRow,
        needs="principal",
    ),
    Operation(
        name="list_schedules",
        method="GET",
        path="/v1/schedules",
        summary="Schedules and their next fire times",
        handler=schedules.list_schedules,
        answer=schedules.ScheduleRows,
        needs="principal",
    ),
    Operation(
        name="show_schedule",
        method="GET",
        path="/v1/schedules/{id:path}",
        summary="A schedule and its next fire times",
        handler=schedules.show_schedule,
        query=schedules.PreviewQuery,
        answer=schedules.ScheduleRow,
        needs="principal",
    ),
    Operation(
        name="add_schedule",
        method="POST",
        path="/v1/schedules",
        summary="Add or replace a schedule",
        handler=schedules.add_schedule,
        body=schedules.NewSchedule,
        answer=schedules.ScheduleRow,
        needs="administer",
        body_bytes=None,
    ),
    Operation(
        name="preview_schedule",
        method="POST",
        path="/v1/schedules/preview",
        summary="Fire times of an interval or a cron expression",
        handler=schedules.preview_schedule,
        body=schedules.PreviewRequest,
        answer=schedules.Preview,
        needs="principal",
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
    """The OpenAPI 3.1 document of all operations."""
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
            "default": _content("Failure", FailureResponse),
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, **_content("", operation.body)}
    elif operation.takes == "arrow":
        described["requestBody"] = {"required": True, "content": {ARROW: {}}}
    return described


def _answer(operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        return {"description": "Success", "content": {ARROW: {}}}
    return _content("Success", operation.answer)


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
