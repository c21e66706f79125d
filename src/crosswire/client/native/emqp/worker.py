"""eMQP's worker: it does jobs by calling Python callables from a list of those allowed.

worker = Worker("127.0.0.1", queues=[(10, "reports")], slots=8)
worker.allow(billing.sum_up)
async with worker:
    await worker.stopped

The callable that a message names is looked up in the list and nowhere else: nothing is imported.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from crosswire.client.native.dial import Addresses, Backoff, Redialler
from crosswire.client.native.emqp.executors import (
    JobExecutor,
    ProcessJobExecutor,
    ThreadJobExecutor,
)
from crosswire.client.native.emqp.peer import EmqpPeer, connect_peer
from crosswire.errors import ConnectionLost
from crosswire.wire.contract import ConnectionClosed, ConnectionFailed, Event
from crosswire.wire.emqp.events import PeerLeaving, PeerReady, Registered, RequestReceived
from crosswire.wire.emqp.frames import EmqpLimits
from crosswire.wire.emqp.headers import Headers
from crosswire.wire.emqp.jobs import TIMEOUT, Job, parse_job, serialize_value
from crosswire.wire.emqp.states import State
from crosswire.wire.zmtp.mechanisms import Mechanism

__all__ = ["Worker"]

WORKERS_PORT = 47290
CROSSING_S = 0.2
"""How long a job that crosses our goodbye may take to arrive."""

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("crosswire.client.native.emqp")


class _WorkerPeer(EmqpPeer):
    """A worker's broker; `opened` when the worker is registered."""

    def __init__(self, owner: Worker) -> None:
        super().__init__()
        self._owner = owner

    def handle_event(self, event: Event) -> None:
        match event:
            case PeerReady():
                pass  # the handshake is done, but the worker is not registered
            case Registered():
                self._owner._join(self)
                self.open()
            case RequestReceived():
                self._owner._begin(event)
            case PeerLeaving():
                self._owner._follow()
            case _:
                super().handle_event(event)

    def finish(self, end: ConnectionClosed | ConnectionFailed) -> None:
        super().finish(end)
        self._owner._part(self)


class Worker:
    """Takes jobs from `queues` (weight and name), at most `slots` at a time.

    Coroutine functions run on the event loop. Others run in threads, or with
    `isolation="process"` in processes of their own: only these can be stopped when a job's timeout
    has passed. A thread can't, so its slot stays taken until it returns; the timeout is reported to
    the broker in either case.

    When the connection is lost the worker finishes its jobs, reconnects, and sends the results.
    """

    def __init__(
        self,
        host: str,
        port: int = WORKERS_PORT,
        *,
        queues: Sequence[tuple[int, str]] = ((10, "default"),),
        slots: int = 4,
        jobs: Mapping[str, Callable[..., Any]] | None = None,
        isolation: Literal["thread", "process"] = "thread",
        mechanism: Mechanism | None = None,
        limits: EmqpLimits | None = None,
        backoff: Backoff | None = None,
        connect_timeout_s: float = 10.0,
        others: Sequence[tuple[str, int]] = (),
    ) -> None:
        if slots < 1:
            raise ValueError("a worker needs at least 1 slot")
        self._addresses = Addresses(host, port, others)
        self._queues = tuple(queues)
        self._slots = slots
        self._mechanism = mechanism
        self._limits = limits
        self._connect_timeout_s = connect_timeout_s
        self._allowed: dict[str, Callable[..., Any]] = {}
        self._classes: dict[str, type] = {}
        self._executor: JobExecutor = (
            ProcessJobExecutor(slots) if isolation == "process" else ThreadJobExecutor(slots)
        )
        self._peer: _WorkerPeer | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._unsent: list[tuple[bytes, str]] = []
        self._stopping = False
        self._redialler: Redialler[_WorkerPeer] = Redialler(
            lambda: self._addresses.reach(self._connect),
            backoff=backoff,
            on_end=self._on_redialler_end,
        )
        self.stopped = asyncio.Event()
        self.failure: ConnectionLost | None = None
        """Why the worker stopped without `stop`; None while it works."""
        for name, function in (jobs or {}).items():
            self.allow(function, name=name)

    # What may be called.

    def allow(self, function: F, *, name: str | None = None) -> F:
        """Let messages call `function` as `module.function`, or under another full name.

        Raises ValueError for a callable that can't be called so.
        """
        full = name or f"{function.__module__}.{function.__name__}"
        if "." not in full:
            raise ValueError(f"{full!r} is not the full name of a callable")
        self._executor.check(function)
        self._allowed[full] = function
        return function

    def allow_methods(self, kind: type, *methods: str, name: str | None = None) -> None:
        """Let messages call these methods, each time on a new object of `kind` that is made with
        the message's class_args and class_kwargs; the path is `module:Class`."""
        path = name or f"{kind.__module__}:{kind.__name__}"
        self._executor.check(kind)
        for method in methods:
            if not callable(getattr(kind, method, None)):
                raise ValueError(f"{kind.__name__} has no method {method!r}")
            self._classes[f"{path}.{method}"] = kind

    # Life.

    async def __aenter__(self) -> Worker:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Register with the broker. Raises ConnectFailed."""
        await self._redialler.start()

    async def stop(self, grace_s: float = 300.0) -> None:
        """Send the goodbye, wait `grace_s` for running jobs, send their results, disconnect.

        Jobs that take longer are stopped where they can be, and their results are lost: a broker
        gives guaranteed jobs to another worker.
        """
        if self.stopped.is_set() and self.failure is None:
            return
        self._stopping = True
        peer = self._peer
        if peer is not None:
            offered = peer.connection.free_slots
            peer.connection.leave()
            peer.session.wake()
            if offered:
                # A job may be on its way for a slot that was offered before the goodbye.
                await asyncio.wait([peer.ended], timeout=CROSSING_S)
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        await self._redialler.stop()
        await self._executor.close()
        self.stopped.set()

    def _on_redialler_end(self, reason: ConnectionLost) -> None:
        """The worker reconnects no more: set `stopped`, with the reason in `failure`."""
        self.failure = reason
        self.stopped.set()

    @property
    def busy(self) -> int:
        """Jobs being done now."""
        return len(self._running)

    # The connection.

    async def _connect(self, host: str, port: int) -> _WorkerPeer:
        peer = _WorkerPeer(self)
        await connect_peer(
            peer,
            "worker",
            host,
            port,
            queues=self._queues,
            mechanism=self._mechanism,
            limits=self._limits,
            timeout_s=self._connect_timeout_s,
        )
        return peer

    def _join(self, peer: _WorkerPeer) -> None:
        """Send results of earlier connections, then a READY for every free slot.

        In this order, so that the broker settles those jobs before it gives out others.
        """
        self._peer = peer
        unsent, self._unsent = self._unsent, []
        for message, request in unsent:
            self._hand_in(message, request)
        if not self._stopping:
            for _ in range(self._slots - len(self._running)):
                peer.connection.send_ready()

    def _part(self, peer: _WorkerPeer) -> None:
        if self._peer is peer:
            self._peer = None

    def _follow(self) -> None:
        """Close the connection of a broker that is leaving, once it has all results; reconnect."""
        peer = self._peer
        if peer is not None and peer.connection.state is State.LEAVING and not self._running:
            peer.connection.close()
            peer.session.wake()

    def _hand_in(self, message: bytes, request: str) -> None:
        peer = self._peer
        if peer is None or peer.connection.state not in (State.REGISTERED, State.LEAVING):
            # Kept for the next connection: the broker knows the job by its request's id.
            self._unsent.append((message, request))
            return
        peer.connection.send_reply(message, request)
        peer.session.wake()

    def _offer(self) -> None:
        peer = self._peer
        if peer is not None and peer.connection.state is State.REGISTERED and not self._stopping:
            peer.connection.send_ready()
            peer.session.wake()

    # Jobs.

    def _begin(self, request: RequestReceived) -> None:
        task = asyncio.create_task(self._do(request))
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.error("a job could not be done", exc_info=error)
        # A slot is offered when its job has ended, however it ended.
        self._offer()
        if not self._stopping:
            self._follow()

    async def _do(self, request: RequestReceived) -> None:
        headers = Headers.parse(request.headers)
        call = self._resolve(request)
        if isinstance(call, str):
            _log.warning("job %s refused: %s", request.msgid, call)
            self._answer(request, headers, call)
            return
        work = asyncio.ensure_future(self._executor.run(*call))
        try:
            done, _ = await asyncio.wait([work], timeout=headers.timeout_s)
            if done:
                self._answer(request, headers, self._value(work, request))
                return
            # Answered before it has ended: a thread can't be stopped, and the caller waits.
            self._answer(request, headers, TIMEOUT)
            work.cancel()
            # The slot is free only when the job has really ended.
            await asyncio.wait([work])
        except asyncio.CancelledError:
            work.cancel()
            raise

    def _resolve(self, request: RequestReceived) -> _Call | str:
        """What to call, or the reason why not."""
        job = parse_job(request.message)
        if job is None:
            return "the message is not a call"
        function = self._allowed.get(job.name)
        if function is not None:
            return function, None, job
        kind = self._classes.get(job.name)
        if kind is not None:
            return kind, job.callable, job
        return f"{job.name} is not allowed here"

    def _value(self, work: asyncio.Future[Any], request: RequestReceived) -> Any:
        """The result; an exception is reported as its text, as a deployed job manager does."""
        error = asyncio.CancelledError("cancelled") if work.cancelled() else work.exception()
        if error is None:
            return work.result()
        _log.warning("job %s failed", request.msgid, exc_info=error)
        return str(error) or type(error).__name__

    def _answer(self, request: RequestReceived, headers: Headers, value: Any) -> None:
        if not headers.reply_requested:
            return
        try:
            message = serialize_value(value)
        except (TypeError, ValueError, RecursionError) as error:
            message = serialize_value(f"the result is not JSON: {error}")
        self._hand_in(message, request.msgid)


_Call = tuple[Callable[..., Any], str | None, Job]
"""A function, or a class and its method; and with what to call them."""
