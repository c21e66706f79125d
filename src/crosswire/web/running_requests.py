"""Requests in progress: they end before the store is closed that they read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RunningRequests"]

_POLL_S: Final = 0.01
_ANSWER_S: Final = 1.0
"""How long a client may take to accept the refusal of its request."""


class _RunningRequest:
    """A request: whether its response has begun, and whether it has to end."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self.has_begun = False
        self.is_cancelled = False

    def cancel(self, task: asyncio.Task[object]) -> None:
        """End it. A response that has begun can't become a refusal: it is cut off, so that no
        client takes what it has got for all there is, and ends like one whose client has left."""
        self.is_cancelled = True
        if self.has_begun:
            self.abort()
        else:
            task.cancel()

    def abort(self) -> None:
        """Close the connection without another byte."""
        self._scope["state"]["abort"]()


class RunningRequests:
    """Passes requests to an application, and ends them when the hub stops; `refuse` is what answers
    then."""

    def __init__(self, app: ASGIApp, refuse: ASGIApp) -> None:
        self._app = app
        self._refuse = refuse
        self._running: dict[asyncio.Task[object], _RunningRequest] = {}
        self._is_closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's entry."""
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        if self._is_closed:
            await self._refuse(scope, receive, send)
            return
        request = _RunningRequest(scope)

        async def noted(message: Message) -> None:
            request.has_begun = True
            await send(message)

        self._running[task] = request
        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not request.is_cancelled:
                raise
            task.uncancel()
            if not request.has_begun:
                await self._refuse(scope, receive, send)
        finally:
            del self._running[task]

    @property
    def count(self) -> int:
        """How many are in progress."""
        return len(self._running)

    def close(self) -> None:
        """Refuse all requests that begin from now on."""
        self._is_closed = True

    async def end(self, within_s: float, is_hurried: Callable[[], bool]) -> None:
        """Wait for the requests that are in progress, and cancel what is left of them after this
        time, or as soon as `is_hurried`. None of them runs when this returns."""
        ending = dict(self._running)
        await self._wait(ending, within_s, is_hurried)
        for task, request in ending.items():
            if not task.done():
                request.cancel(task)
        await self._wait(ending, _ANSWER_S, lambda: False)
        for task, request in ending.items():
            if not task.done():
                # Its client does not read: it gets no answer.
                request.abort()
                task.cancel()
        if ending:
            await asyncio.wait(ending)

    @staticmethod
    async def _wait(
        ending: dict[asyncio.Task[object], _RunningRequest],
        within_s: float,
        is_over: Callable[[], bool],
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while not all(task.done() for task in ending):
            if loop.time() >= deadline or is_over():
                return
            await asyncio.sleep(_POLL_S)
