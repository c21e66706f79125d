"""Bond services offered by objects of the program."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any

from crosswire.bond import marshal
from crosswire.bond.schema import MethodDef, ServiceDef
from crosswire.client.native.epoxy.peer import Handler, IncomingCall
from crosswire.errors import CallFailed
from crosswire.wire.epoxy.comm import ErrorCode

__all__ = ["offer"]


def offer(service: ServiceDef, implementation: object) -> dict[tuple[str, str], Handler]:
    """Handlers that call the methods of an object with Bond values, and answer with what they give.

    For each method of the service the object has one of the same name, or its name in snake case: a
    coroutine function of the request, or of the request and its IncomingCall. Raises TypeError if
    one is missing.
    """
    handlers: dict[tuple[str, str], Handler] = {}
    for method in service.methods.values():
        function = getattr(implementation, method.name, None) or getattr(
            implementation, _snake_case(method.name), None
        )
        if not inspect.iscoroutinefunction(function):
            raise TypeError(
                f"{type(implementation).__name__} has no coroutine method {method.name} "
                f"for the service {service.full_name}"
            )
        handlers[service.full_name, method.name] = _handler(service, method, function)
    return handlers


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _handler(
    service: ServiceDef, method: MethodDef, function: Callable[..., Awaitable[Any]]
) -> Handler:
    takes_call = len(inspect.signature(function).parameters) > 1
    name = f"{service.full_name}.{method.name}"

    async def handle(call: IncomingCall) -> bytes | None:
        if call.is_event != method.is_event:
            raise CallFailed(
                ErrorCode.INVALID_INVOCATION,
                f"{name} is {'an event' if method.is_event else 'a request'}",
            )
        request = marshal.unmarshal(call.payload, method.request)
        result = await (function(request, call) if takes_call else function(request))
        if method.response is None:
            return None
        return marshal.marshal(
            method.response.python_class() if result is None else result, method.response
        )

    return handle
