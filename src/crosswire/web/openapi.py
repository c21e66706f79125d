"""The OpenAPI document, generated from the table of operations and the structs that they use.

Descriptions are summaries and docstrings: of a struct, and of a field the string literal after it.
Others are described by `vocabulary`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from crosswire import __version__
from crosswire.web.api import OPERATIONS
from crosswire.web.contract import (
    ARROW,
    BYTES,
    EVENT_STREAM,
    JSON,
    FailureResponse,
    Operation,
    statuses_of,
)
from crosswire.web.vocabulary import DESCRIPTIONS, ERRORS, EXAMPLES, TAGS

__all__ = ["openapi"]

_REFERENCES: Final = "#/components/schemas/{name}"
_TIME: Final = "2026-11-16T12:00:00.250000Z"
_DEPTH: Final = 8
_TYPE_EXAMPLES: Final[dict[str, Any]] = {
    "boolean": False,
    "integer": 1,
    "null": None,
    "number": 0.5,
    "string": "",
}


@functools.cache
def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document of all operations. The first call takes long: not on the loop."""
    bodies = [kind for each in OPERATIONS for kind in (each.answer, each.body) if kind is not None]
    _, schemas = msgspec.json.schema_components(
        [*bodies, FailureResponse], ref_template=_REFERENCES
    )
    structs = _structs([*bodies, FailureResponse])
    for name, schema in schemas.items():
        _describe_fields(schema, structs.get(name), schemas)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        path = re.sub(r"{(\w+):\w+}", r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _describe(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Crosswire",
            "version": __version__,
            "description": (
                "The state of a message hub, its messages, dead letters and schedules. Times are"
                " RFC 3339. Lists have pages: `next` of a response is `cursor` of the request for"
                " the next page. Unknown parameters are refused."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths | _plain_paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "The token of a user. Without users, none is needed.",
                }
            },
        },
        "security": [{"token": []}, {}],
    }


# Operations.


def _describe(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    statuses = statuses_of(operation)
    described: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": _paragraph(operation.handler.__doc__ or operation.summary),
        "parameters": [*_path_parameters(operation), *_query_parameters(operation.query)],
        "responses": {
            "200": _answer(operation, schemas),
            **{str(status): _failure(status) for status in statuses},
            "default": _failure(500),
        },
    }
    if operation.needs == "nothing":
        described["security"] = []
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            **_content("", operation.body, schemas),
        }
    elif operation.takes == "arrow":
        described["requestBody"] = {
            "required": True,
            "description": "An Arrow stream with a row for each message.",
            "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}},
        }
    elif operation.takes == "bytes":
        described["requestBody"] = {
            "required": True,
            "description": "The bytes of a file.",
            "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}},
        }
    elif operation.method in ("POST", "PATCH"):
        described["requestBody"] = {
            "required": False,
            "description": "An empty object, or nothing; the content type must be JSON.",
            "content": {JSON: {"schema": {"type": "object", "maxProperties": 0}, "example": {}}},
        }
    return described


def _paragraph(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split())


def _answer(operation: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    if operation.answer is not None:
        text = _paragraph(operation.answer.__doc__ or "Success.")
        return _content(text, operation.answer, schemas)
    if operation.streams == EVENT_STREAM:
        return {
            "description": "Server-sent events, until the client disconnects.",
            "content": {
                EVENT_STREAM: {"schema": {"type": "string"}, "example": operation.example_event}
            },
        }
    if operation.streams == BYTES:
        return {
            "description": "The bytes of a file.",
            "content": {BYTES: {"schema": {"type": "string", "format": "binary"}}},
        }
    return {
        "description": "An Arrow stream.",
        "content": {ARROW: {"schema": {"type": "string", "format": "binary"}}},
    }


def _failure(status: int) -> dict[str, Any]:
    code, text = ERRORS[status]
    reference = {"$ref": _REFERENCES.format(name=FailureResponse.__name__)}
    example = {"error": code, "description": text}
    return {"description": text, "content": {JSON: {"schema": reference, "example": example}}}


def _content(
    description: str, kind: type[msgspec.Struct], schemas: dict[str, Any]
) -> dict[str, Any]:
    reference = {"$ref": _REFERENCES.format(name=kind.__name__)}
    example = _example("", reference, schemas)
    content: dict[str, Any] = {"content": {JSON: {"schema": reference, "example": example}}}
    return {"description": description, **content} if description else content


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    found = []
    for name, kind in re.findall(r"{(\w+)(:\w+)?}", operation.path):
        schema: dict[str, Any] = {"type": "string", "minLength": 1}
        if kind == ":id":
            schema = {"type": "integer", "minimum": 0, "maximum": (1 << 63) - 1}
        found.append(
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": DESCRIPTIONS[name]
                + (" It may have slashes." if kind == ":path" else ""),
                "schema": schema,
                "example": 4711 if kind == ":id" else EXAMPLES.get(name, "orders"),
            }
        )
    return found


def _query_parameters(kind: type[msgspec.Struct] | None) -> list[dict[str, Any]]:
    if kind is None:
        return []
    schema = msgspec.json.schema(kind)["$defs"][kind.__name__]
    texts = _field_texts(kind)
    found = []
    for name, field in schema["properties"].items():
        text = texts.get(name) or DESCRIPTIONS[name]
        found.append(
            {
                "name": name,
                "in": "query",
                "required": name in schema["required"],
                "description": text,
                "schema": field,
                "example": _example(name, field, {}),
            }
        )
    return found


# Fields.


def _structs(roots: list[type[msgspec.Struct]]) -> dict[str, type[msgspec.Struct]]:
    """All structs that these refer to, by name."""
    found: dict[str, type[msgspec.Struct]] = {}

    def visit(kind: Any) -> None:
        if isinstance(kind, msgspec.inspect.StructType):
            if kind.cls.__name__ in found:
                return
            found[kind.cls.__name__] = kind.cls
            for field in kind.fields:
                visit(field.type)
            return
        for name in ("item_type", "key_type", "value_type", "types", "item_types", "type"):
            for each in _listed(getattr(kind, name, None)):
                visit(each)

    for root in roots:
        visit(msgspec.inspect.type_info(root))
    return found


def _listed(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _describe_fields(
    schema: dict[str, Any], kind: type[msgspec.Struct] | None, schemas: dict[str, Any]
) -> None:
    texts = {} if kind is None else _field_texts(kind)
    for name, field in schema.get("properties", {}).items():
        text = field.pop("description", "") or texts.get(name) or DESCRIPTIONS.get(name, "")
        if "$ref" in field:
            # Beside a reference, which only newer readers combine with other keywords.
            field["allOf"] = [{"$ref": field.pop("$ref")}]
        if text:
            field["description"] = text
        field["examples"] = [_example(name, field, schemas)]


def _field_texts(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The string literals after the fields of a struct, those of its bases included."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        module = sys.modules.get(each.__module__)
        if issubclass(each, msgspec.Struct) and module is not None and each is not msgspec.Struct:
            texts |= _module_texts(getattr(module, "__file__", None) or "").get(each.__name__, {})
    return texts


@functools.cache
def _module_texts(file: str) -> dict[str, dict[str, str]]:
    """By class and field; nothing where there is no source."""
    try:
        tree = ast.parse(Path(file).read_text())
    except OSError:
        return {}
    found: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            texts = found[node.name] = {}
            for field, after in zip(node.body, node.body[1:], strict=False):
                if (
                    isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                ):
                    texts[field.target.id] = _paragraph(after.value.value)
    return found


# Examples.


def _example(name: str, schema: dict[str, Any], schemas: dict[str, Any], depth: int = 0) -> Any:
    """An example that is valid for a schema: that of the vocabulary where it fits."""
    for combined in ("allOf", "anyOf"):
        if combined in schema:
            return _example(name, schema[combined][0], schemas, depth)
    if "$ref" in schema:
        referred = schemas.get(schema["$ref"].rpartition("/")[2], {})
        return {} if depth > _DEPTH else _example(name, referred, schemas, depth + 1)
    if "enum" in schema:
        return schema["enum"][0]
    if "default" in schema and name not in EXAMPLES:
        return schema["default"]
    kind = schema.get("type")
    if kind == "object":
        return {
            key: _example(key, field, schemas, depth + 1)
            for key, field in schema.get("properties", {}).items()
            if depth <= _DEPTH
        }
    if kind == "array":
        prefix = schema.get("prefixItems")
        if prefix is not None:
            return [_example(name, each, schemas, depth + 1) for each in prefix]
        items = schema.get("items", {})
        return [_example(name, items, schemas, depth + 1)] if items and depth <= _DEPTH else []
    if schema.get("format") == "date-time":
        return _TIME
    example = EXAMPLES.get(name)
    if name in EXAMPLES and (kind is None or _is_of(example, kind)):
        return example
    return (
        max(_TYPE_EXAMPLES.get(kind or "", None) or 0, schema["minimum"])
        if (kind in ("integer", "number") and "minimum" in schema)
        else _TYPE_EXAMPLES.get(kind or "null")
    )


def _is_of(value: Any, kind: str) -> bool:
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "object": dict,
    }
    return isinstance(value, kinds.get(kind, ()))


# Routes that are not operations.


def _plain_paths() -> dict[str, Any]:
    def path(
        name: str, tag: str, summary: str, text: str, content: dict[str, Any], *statuses: int
    ) -> dict[str, Any]:
        return {
            "get": {
                "operationId": name,
                "tags": [tag],
                "summary": summary,
                "description": text,
                "parameters": [],
                "responses": {
                    "200": {"description": summary, "content": content},
                    "400": _failure(400),
                    **{str(status): _failure(status) for status in statuses},
                    "default": _failure(500),
                },
                **({} if statuses else {"security": []}),
            }
        }

    readiness = {
        "type": "object",
        "required": ["status"],
        "properties": {
            "status": {"type": "string", "description": "`ready`, `damaged` or `not ready`."},
            "reasons": _texts("Why it is not ready."),
            "notes": _texts("What operators should know."),
            "damage": _texts("What of the store is damaged."),
            "leader": {"type": "object", "description": "Of a standby: name and address."},
        },
    }
    example = {"status": "ready", "reasons": [], "notes": []}
    ready = path(
        "readyz",
        "hub",
        "Whether the hub serves its peers",
        "200 if it is ready, 503 if it is not. Damage does not make it unready. Only observers see"
        " reasons, notes and damage.",
        {JSON: {"schema": readiness, "example": example}},
    )
    ready["get"]["responses"]["503"] = {
        "description": "The hub is not ready.",
        "content": {
            JSON: {
                "schema": readiness,
                "example": {"status": "not ready", "reasons": ["draining"], "notes": []},
            }
        },
    }
    alive = {"type": "object", "properties": {"status": {"type": "string"}}}
    return {
        "/healthz": path(
            "healthz",
            "hub",
            "Whether the hub runs",
            "The response shows that the event loop runs. Nothing else is checked.",
            {JSON: {"schema": alive, "example": {"status": "ok"}}},
        ),
        "/readyz": ready,
        "/metrics": path(
            "metrics",
            "hub",
            "Metrics for Prometheus",
            "Counters, gauges and histograms in Prometheus' text format. Needs the right to"
            " observe.",
            {"text/plain": {"schema": {"type": "string"}, "example": "crosswire_queues 3\n"}},
            401,
            403,
        ),
        "/openapi.json": path(
            "openapi",
            "hub",
            "This document",
            "The description of all operations.",
            {JSON: {"schema": {"type": "object"}, "example": {"openapi": "3.1.0"}}},
        ),
    }


def _texts(description: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "description": description}
