"""Services: a call goes to one of the providers in turn, its answer back to the caller."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, Protocol, TypeAlias

from crosswire.commitlog.contract import AcceptedMessages
from crosswire.envelope import MICROSECONDS, Envelope, encode, parse_destination, stamp, stamp_run
from crosswire.errors import (
    CallCancelled,
    CallError,
    CallTimeout,
    DestinationFull,
    InvalidDestination,
    InvalidEnvelope,
    NoProvider,
    ProviderLost,
    StoreError,
)
from crosswire.hub.attachment import Delivery, Window
from crosswire.hub.core import Core
from crosswire.hub.ledger import LedgerPeer, Step
from crosswire.hub.policies import ServicePolicy, TopicPolicy
from crosswire.hub.shares import DestinationOwners, Quota
from crosswire.hub.topics import Topic

__all__ = ["Answer", "Call", "Provider", "ProviderReceiver", "Services"]

_CALL_BYTES: Final = 1024
"""What a call in progress takes in memory beside its payload, roughly."""
_LEAST_BYTES: Final = 128 * 1024 * 1024
"""Calls of one user have at least this much: room for one of any size that a protocol allows."""
_ENDED: Final = 256
"""Calls that are given out or ended before others may have a turn."""
_URGENT: Final = 1 << 30
"""The weight of providers: a caller waits for the answer, so they are woken before the consumers
that share their window."""

_numbers = count()


_NO_IDS: Final = "the hub's disk takes nothing more"
Answer: TypeAlias = Envelope | CallError | DestinationFull | InvalidDestination | InvalidEnvelope


class ProviderReceiver(Protocol):
    """A gateway's side of a provider: requests to answer, and ids that need no answer any more."""

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        """Send these to the peer, which answers with `Provider.answer` or `Provider.fail`."""

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        """Nobody waits for the answers to these any more."""

    def broken(self, error: Exception) -> None:
        """One of its methods raised: the hub closed the provider, and its calls have failed. End
        the peer's connection, which would wait for ever."""


class Call:
    """A request in progress. `answered` is called once, with the answer or the error."""

    __slots__ = (
        "answered",
        "due",
        "envelope",
        "holder",
        "id",
        "is_done",
        "peer",
        "provider",
        "service",
        "size_bytes",
    )

    def __init__(
        self,
        envelope: Envelope,
        due: float,
        peer: LedgerPeer,
        answered: Callable[[Call, Answer], None],
        holder: str,
    ) -> None:
        self.envelope = envelope
        self.id = envelope.id
        self.size_bytes = len(envelope.payload) + _CALL_BYTES
        """What it takes in memory, roughly."""
        self.holder = holder
        """Whose share it counts for while it waits."""
        self.due = due
        self.peer = peer
        self.answered = answered
        self.provider: Provider | None = None
        self.service: _Service | None = None
        self.is_done = False


class Provider:
    """Answers calls of one or more services, at most `window` at a time; `number` is larger than
    that of all that were made before it."""

    __slots__ = (
        "_services",
        "calls",
        "is_open",
        "names",
        "number",
        "peer",
        "receiver",
        "weight",
        "window",
    )

    def __init__(
        self,
        services: Services,
        receiver: ProviderReceiver,
        names: Sequence[str],
        peer: LedgerPeer,
        window: Window,
    ) -> None:
        self._services = services
        self.receiver = receiver
        self.names = list(names)
        self.number = next(_numbers)
        self.peer = peer
        self.window = window
        self.weight = _URGENT
        self.calls: dict[int, Call] = {}
        self.is_open = True
        window.join(self)

    def answer(self, identifier: int, response: Envelope, now: float) -> bool:
        """The response to a request; False if nobody waits for it any more."""
        return self._services.answer(self, identifier, response, now)

    def fail(self, identifier: int, error: CallError, now: float) -> bool:
        """The request failed, and why; False if nobody waits for it any more."""
        return self._services.fail(self, identifier, error, now)

    def wake(self, now: float) -> None:
        """There is free capacity in its window."""
        self._services.wake(self, now)

    def dispatch(self, now: float) -> None:
        """Take waiting calls, as far as the window allows."""
        self._services.serve(self, now)

    def close(self, now: float) -> None:
        """Detach it: calls that it has not answered fail with ProviderLost."""
        self._services.detach(self, now)


class _Service:
    __slots__ = ("calls", "name", "providers", "share", "waiting")

    def __init__(self, name: str, share: Quota) -> None:
        self.name = name
        self.calls = 0
        self.providers: deque[Provider] = deque()
        self.waiting: OrderedDict[Call, None] = OrderedDict()
        self.share = share

    def wait(self, call: Call) -> None:
        """Queue a call until a provider is free. Raises DestinationFull."""
        if self.share.is_full:
            raise DestinationFull(f"{self.name} has {len(self.waiting)} calls waiting")
        self.share.check(call.holder)
        self.share.add(call.holder)
        self.waiting[call] = None

    def next(self) -> Call:
        """The call that has waited longest."""
        return next(iter(self.waiting))

    def remove(self, call: Call) -> None:
        """It waits no longer. May be repeated."""
        if call in self.waiting:
            del self.waiting[call]
            self.share.remove(call.holder)


class Services:
    """Providers by service, calls under way, and the journal of what they exchanged."""

    def __init__(
        self,
        core: Core,
        policy: ServicePolicy,
        retention: TopicPolicy,
        owners: DestinationOwners,
        *,
        share: float,
        calls_bytes: int,
    ) -> None:
        """`share` is the part of a service's waiting calls, and of `calls_bytes` in progress, that
        one user or address may have."""
        self.policy = policy
        self._share = share
        self._bytes_share = Quota("bytes of calls in progress", calls_bytes, share)
        self._configure_bytes(calls_bytes)
        self.journals: dict[str, Topic] = {}
        """Requests and responses by service, kept as long as the messages of topics."""
        self._retention = retention
        self._owners = owners
        self._core = core
        self._store = core.store
        self._loop = core.loop
        self._services: dict[str, _Service] = {}
        self._calls: dict[int, Call] = {}
        self._due: list[tuple[float, int]] = []
        self._unjournaled: set[str] = set()
        self.unjournaled = 0
        """Requests and responses without a record, because too much waited for the log."""

    def reconfigure(
        self, policy: ServicePolicy, retention: TopicPolicy, *, share: float, calls_bytes: int
    ) -> None:
        """Another policy for calls, and for how long they are kept, from now on."""
        self.policy = policy
        self._retention = retention
        self._share = share
        self._configure_bytes(calls_bytes)
        for service in self._services.values():
            service.share.configure(policy.waiting, share)
        for journal in self.journals.values():
            journal.policy = retention

    def _configure_bytes(self, calls_bytes: int) -> None:
        most = max(calls_bytes, _LEAST_BYTES)
        self._bytes_share.configure(most, max(self._share, _LEAST_BYTES / most))

    # Providers.

    def provide(
        self,
        destinations: Sequence[str],
        receiver: ProviderReceiver,
        now: float,
        *,
        peer: LedgerPeer,
        window: Window,
    ) -> Provider:
        """Add a provider: see `Hub.provide`. Raises InvalidDestination."""
        names = []
        for destination in destinations:
            parsed = parse_destination(destination)
            if parsed.kind != "service":
                raise InvalidDestination(f"{destination!r} is not a service")
            names.append(destination)
        provider = Provider(self, receiver, names, peer, window)
        for name in names:
            service = self._services.get(name)
            if service is None:
                share = Quota(f"calls waiting for {name}", self.policy.waiting, self._share)
                service = self._services[name] = _Service(name, share)
            service.providers.append(provider)
        self.wake(provider, now)
        return provider

    def detach(self, provider: Provider, now: float) -> None:
        """Remove a provider; its calls fail, and so do waiting ones that nobody else serves."""
        if not provider.is_open:
            return
        provider.is_open = False
        provider.window.attachments.remove(provider)
        for name in provider.names:
            service = self._services[name]
            service.providers.remove(provider)
            if not service.providers:
                del self._services[name]
                self._unjournaled.discard(name)
                gone = NoProvider(f"nobody serves {name} any more")
                self._finish_parts(list(service.waiting), gone, now)
        lost = ProviderLost("the provider left before it answered")
        self._finish_parts(list(provider.calls.values()), lost, now)
        self._loop.pump(now)

    def _finish_parts(self, calls: Sequence[Call], error: CallError, now: float) -> None:
        """End calls that nobody answers any more; there may be thousands, so in parts."""
        for start in range(0, len(calls), _ENDED):
            self._loop.defer("call", self._finish_all, calls[start : start + _ENDED], error, now)

    def _finish_all(
        self, calls: Sequence[Call], error: CallError, now: float, notify: bool = True
    ) -> None:
        for call in calls:
            self._finish(call, error, now, notify=notify)

    def all(self) -> list[Provider]:
        """Every provider, once."""
        found = {each: None for service in self._services.values() for each in service.providers}
        return list(found)

    def of(self, name: str) -> list[Provider]:
        """The providers of a service, by its destination."""
        service = self._services.get(name)
        return [] if service is None else list(service.providers)

    def providers(self) -> dict[str, list[LedgerPeer]]:
        """Whose providers serve which service, by destination."""
        return {
            name: [provider.peer for provider in service.providers]
            for name, service in self._services.items()
        }

    def names(self) -> list[str]:
        """The destinations of all services that somebody provides."""
        return list(self._services)

    @property
    def count(self) -> int:
        """How many services have a provider."""
        return len(self._services)

    def load(self, name: str) -> tuple[int, int]:
        """How many calls of a service are in progress, and how many of them wait for a provider."""
        service = self._services.get(name)
        return (0, 0) if service is None else (service.calls, len(service.waiting))

    def is_served(self, destination: str) -> bool:
        """Whether there is a provider. Raises InvalidDestination."""
        return self._find(destination) is not None

    def _find(self, destination: str) -> _Service | None:
        """A provider of the method itself comes before one of the whole service."""
        service = self._services.get(destination)
        if service is None:
            parsed = parse_destination(destination)
            if parsed.kind != "service":
                raise InvalidDestination(f"{destination!r} is not a service")
            if parsed.method:
                service = self._services.get(f"service/{parsed.name}")
        return service

    # Calls.

    def call(
        self,
        envelopes: Sequence[Envelope],
        now: float,
        *,
        answered: Callable[[Call, Answer], None],
        peer: LedgerPeer,
        timeout_s: float | None,
    ) -> list[Call]:
        """Call services: see `Hub.call`."""
        now_us = int(now * MICROSECONDS)
        due = now + (self.policy.deadline_s if timeout_s is None else timeout_s)
        calls: list[Call] = []
        given: dict[Provider, list[Delivery]] = {}
        failed: list[tuple[Call, Answer]] = []
        holder = self._core.holders.of(peer.principal, peer.connection)
        try:
            first = self._store.reserve(len(envelopes))
        except StoreError:
            # Rare: ids are reserved with commits, unless these have failed for long.
            for envelope in envelopes:
                call = Call(envelope, due, peer, answered, holder)
                call.is_done = True
                calls.append(call)
                self._loop.defer("answer", answered, call, DestinationFull(_NO_IDS))
            self._loop.pump(now)
            return calls
        for envelope in stamp_run(
            envelopes, self._store.node, first, self._core.wall.stamp_us(now_us)
        ):
            call = Call(envelope, due, peer, answered, holder)
            calls.append(call)
            try:
                record = encode(envelope)
                service = self._start(call, given)
            except (NoProvider, DestinationFull, InvalidDestination, InvalidEnvelope) as error:
                failed.append((call, error))
            else:
                self._journal(service.name, envelope, record, now)
        self._note_runs(Step.ACCEPTED, now_us, [call.envelope for call in calls], peer)
        self._core.commits.request(sync=False, urgent=False)
        for call, reason in failed:
            self._finish(call, reason, now)
        if given:
            self._loop.defer("request", self._hand_over, given, now_us)
        self._wake()
        self._loop.pump(now)
        return calls

    def _start(self, call: Call, given: dict[Provider, list[Delivery]]) -> _Service:
        destination = call.envelope.destination
        service = self._find(destination)
        if service is None:
            raise NoProvider(f"nobody serves {destination}")
        self._bytes_share.check(call.holder, call.size_bytes)
        if not self._assign(call, service, given):
            service.wait(call)
        self._bytes_share.add(call.holder, call.size_bytes)
        call.service = service
        self._calls[call.id] = call
        service.calls += 1
        heapq.heappush(self._due, (call.due, call.id))
        if len(self._due) > 1024 + 2 * len(self._calls):
            self._due = [entry for entry in self._due if entry[1] in self._calls]
            heapq.heapify(self._due)
        return service

    def _assign(self, call: Call, service: _Service, given: dict[Provider, list[Delivery]]) -> bool:
        providers = service.providers
        for _ in range(len(providers)):
            provider = providers[0]
            providers.rotate(-1)
            if provider.window.free > 0:
                provider.window.free -= 1
                provider.calls[call.id] = call
                call.provider = provider
                given.setdefault(provider, []).append(Delivery(call.envelope, 1))
                return True
        return False

    def wake(self, provider: Provider, now: float) -> None:
        """There is free capacity in a provider's window: for waiting calls."""
        for name in provider.names:
            if self._services[name].waiting:
                self._loop.touch(provider)
                self._loop.pump(now)
                return

    def serve(self, provider: Provider, now: float) -> None:
        """Give waiting calls to a provider, and to others of the service with capacity."""
        for name in provider.names:
            service = self._services.get(name)
            if service is not None and service.waiting and provider.window.free > 0:
                self._serve_waiting(service, now)

    def _serve_waiting(self, service: _Service, now: float) -> None:
        given: dict[Provider, list[Delivery]] = {}
        count = 0
        while service.waiting and self._assign(call := service.next(), service, given):
            service.remove(call)
            count += 1
            if count >= _ENDED:
                # The rest in another part of this turn, or in the next one.
                self._loop.touch(service.providers[0])
                break
        self._hand_over(given, int(now * MICROSECONDS))

    def _hand_over(self, given: dict[Provider, list[Delivery]], now_us: int) -> None:
        for provider, deliveries in given.items():
            # Deferred: some calls may have been cancelled since they were assigned.
            requests = [each for each in deliveries if each.envelope.id in provider.calls]
            if requests:
                envelopes = [each.envelope for each in requests]
                self._note_runs(Step.DELIVERED, now_us, envelopes, provider.peer)
                self._loop.call("request", provider, provider.receiver.request, provider, requests)

    def _note_runs(
        self, step: Step, now_us: int, envelopes: Sequence[Envelope], peer: LedgerPeer
    ) -> None:
        """A run of the ledger for each destination."""
        runs: dict[str, list[int]] = {}
        for each in envelopes:
            runs.setdefault(each.destination, []).append(each.id)
        for destination, ids in runs.items():
            self._core.ledger.note(step, now_us, destination, ids, peer=peer)

    # Answers and failures.

    def answer(self, provider: Provider, identifier: int, response: Envelope, now: float) -> bool:
        """See `Provider.answer`. Raises InvalidEnvelope."""
        call = provider.calls.get(identifier)
        if call is None:
            return False
        request = call.envelope
        response = response.replace(
            destination=request.destination,
            kind="response",
            correlation=response.correlation or request.correlation,
        )
        now_us = int(now * MICROSECONDS)
        time_us = self._core.wall.stamp_us(now_us)
        try:
            response_id = self._store.reserve(1)
        except StoreError:
            self._finish(call, DestinationFull(_NO_IDS), now)
            self._loop.pump(now)
            return True
        response = stamp(response, self._store.node, response_id, time_us)
        record = encode(response)
        if call.service is not None:
            self._journal(call.service.name, response, record, now)
        self._note_runs(Step.ACCEPTED, now_us, [response], provider.peer)
        self._finish(call, response, now)
        self._loop.pump(now)
        return True

    def fail(self, provider: Provider, identifier: int, error: CallError, now: float) -> bool:
        """See `Provider.fail`."""
        call = provider.calls.get(identifier)
        if call is None:
            return False
        self._finish(call, error, now)
        self._loop.pump(now)
        return True

    def cancel(self, calls: Sequence[Call], now: float) -> None:
        """The caller does not wait any longer: providers may stop, nobody is answered."""
        given_up = [call for call in calls if not call.is_done]
        for call in given_up:
            # All of them first: no provider gets one of these while the others are ended.
            if call.service is not None:
                call.service.remove(call)
        left = CallCancelled("the caller left")
        for start in range(0, len(given_up), _ENDED):
            part = given_up[start : start + _ENDED]
            self._loop.defer("call", self._finish_all, part, left, now, False)
        self._loop.defer("cancel", self._withdraw, given_up, now)
        self._loop.pump(now)

    def _withdraw(self, calls: Sequence[Call], now: float) -> None:
        """Notify the providers of calls that ended without their answer.

        After all of those have ended: a provider that is notified may take the next call at once,
        which must not be one of them.
        """
        unanswered: dict[Provider, list[int]] = {}
        for call in calls:
            if call.provider is not None:
                unanswered.setdefault(call.provider, []).append(call.id)
        for provider, ids in unanswered.items():
            self._loop.call("cancel", provider, provider.receiver.cancel, provider, ids)
        self._loop.pump(now)

    def _finish(self, call: Call, answer: Answer, now: float, *, notify: bool = True) -> None:
        """End a call. The answer, and calls that get capacity by it, wait for the next `pump`."""
        if call.is_done:
            return
        call.is_done = True
        self._calls.pop(call.id, None)
        service, provider = call.service, call.provider
        if service is not None:
            self._bytes_share.remove(call.holder, call.size_bytes)
        if provider is not None:
            del provider.calls[call.id]
            if not provider.window.granted:
                provider.window.free += 1
        elif service is not None:
            service.remove(call)
        if service is not None:
            service.calls -= 1
        ended = isinstance(answer, Envelope)
        self._core.ledger.note(
            Step.ANSWERED if ended else Step.FAILED,
            int(now * MICROSECONDS),
            call.envelope.destination,
            [call.id],
            peer=call.peer if provider is None else provider.peer,
            attempt=1,
            detail="" if ended else str(answer),
        )
        self._core.commits.request(sync=False, urgent=False)
        if notify:
            self._loop.defer("answer", call.answered, call, answer)
        if provider is not None and provider.is_open and not provider.window.granted:
            self._loop.touch(provider.window)

    def _wake(self) -> None:
        if self._due:
            self._core.timers.at_least(self, self._due[0][0], self._on_time)

    def _on_time(self, now: float) -> None:
        late: list[Call] = []
        # In parts: those that are due stay due, and `_wake` has them ended with the next timers.
        while self._due and self._due[0][0] <= now and len(late) < _ENDED:
            call = self._calls.get(heapq.heappop(self._due)[1])
            if call is not None:
                late.append(call)
                self._finish(call, CallTimeout("no answer in time"), now)
        self._withdraw(late, now)
        self._wake()

    def is_known(self, name: str) -> bool:
        """Whether somebody provides this service."""
        return name in self._services

    def journal(self, name: str) -> Topic:
        """The stored calls of a service that has a number, opened if need be."""
        journal = self.journals.get(name)
        if journal is None:
            journal = self.journals[name] = Topic(self._core, name, self._retention)
        return journal

    def forget(self, name: str) -> None:
        """A service that nobody provides, and without stored calls, is removed."""
        journal = self.journals.pop(name)
        self._owners.remove(journal.number)
        journal.delete()

    def _holder_of(self, name: str) -> str:
        """Whose share a service counts for: that of its first provider."""
        service = self._services.get(name)
        if service is None or not service.providers:
            return ""
        peer = service.providers[0].peer
        return self._core.holders.of(peer.principal, peer.connection)

    def _journal(self, service: str, envelope: Envelope, record: bytes, now: float) -> None:
        """Store a request or response; nobody waits for the commit."""
        core = self._core
        if self.policy.journal and core.store.has_room(now):
            gate = core.commits.gate
            if gate is not None and gate.is_closed():
                # The answer does not wait for the log, so its record must not fill the memory.
                self.unjournaled += 1
                return
            try:
                journal = self.journals.get(service)
                if journal is None:
                    self._owners.create(service, self._holder_of(service))
                    journal = self.journals[service] = Topic(core, service, self._retention)
            except DestinationFull as error:
                # The call is in progress by now, and continues without a record of its messages.
                if service not in self._unjournaled:
                    self._unjournaled.add(service)
                    core.damage.report(error)
                return
            core.store.append(journal.number, envelope.id, record)
            stored = AcceptedMessages(journal.number, [envelope], [record], [len(record)])
            core.commits.group.stored.append(stored)
            journal.count(envelope.id, len(record), core.wall.stamp_us(int(now * MICROSECONDS)))
