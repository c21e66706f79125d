"""Relink's callers and providers: a request on channel N is answered on channel N, in order.

Requests and answers leave when they are written, so that none comes twice: a hub that was killed
calls again for what it had not answered, and drops what comes for calls that nobody waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from crosswire.envelope import Envelope
from crosswire.errors import (
    CrosswireError,
    InvalidEnvelope,
    LimitExceeded,
    ProviderFailed,
    TooLargeToSend,
    UnexpectedFrame,
)
from crosswire.gateways.gateway import guarded
from crosswire.gateways.relink.link_end import LinkEnd
from crosswire.gateways.relink.link_records import LoadedLink, Outbound, Parts, SentRun
from crosswire.gateways.relink.messages import (
    Origin,
    failure_of,
    failure_parts,
    from_parts,
    timeout_of,
    to_parts,
)
from crosswire.hub.attachment import Delivery, Window
from crosswire.hub.services import Answer, Call, Provider
from crosswire.wire.contract import Event
from crosswire.wire.relink.channels import ReceivingChannel
from crosswire.wire.relink.events import (
    Acknowledged,
    ChannelClosed,
    CloseReceived,
    MessageReceived,
    ShutdownReceived,
)

__all__ = ["CallEnd", "ServeEnd"]

_OPEN_CALLS: Final = 1024
_PROVIDER_CALLS: Final = 256


def _size(parts: Sequence[bytes]) -> int:
    return sum(map(len, parts))


class _PeerCall:
    """A call of the peer, and its answer as soon as there is one."""

    __slots__ = ("answer", "call", "channel", "envelope", "sequence")

    def __init__(self, channel: int, sequence: int) -> None:
        self.channel = channel
        self.sequence = sequence
        self.envelope: Envelope | None = None
        self.call: Call | None = None
        self.answer: Parts | None = None


class CallEnd(LinkEnd):
    """The peer calls. A request counts as received, and as consumed, with its answer."""

    def attach(self) -> None:
        self._requests: dict[int, deque[_PeerCall]] = {}
        self._asked: dict[int, _PeerCall] = {}
        self._answer_bytes = 0
        self._closing: set[int] = set()
        self._used: deque[int] = deque()

    def restored(self, loaded: LoadedLink) -> None:
        del loaded
        for channel, out in self.outbound.items():
            self._answer_bytes += sum(row[2] for row in out.rows)
            if out.reopened:
                self._used.append(channel)

    @property
    def is_busy(self) -> bool:
        return bool(self._asked) or super().is_busy

    def ended(self) -> None:
        self._cancel()

    def receive(self, events: list[Event]) -> None:
        asked: list[_PeerCall] = []
        touched: dict[int, None] = {}
        for event in events:
            if type(event) is MessageReceived:
                asked.append(self._take(event))
                touched[event.channel] = None
            elif type(event) is Acknowledged:
                if event.acknowledgement == "consumed":
                    count = (event.last - event.first) % (1 << 32) + 1
                    self._answer_bytes -= self.done(event.channel, count)
                    touched[event.channel] = None
            elif type(event) is CloseReceived:
                self._closing.add(event.channel)
                touched[event.channel] = None
            elif type(event) is ChannelClosed:
                self._on_closed(event.channel)
                touched[event.channel] = None
            elif type(event) is ShutdownReceived:
                self._shut_down()
                return
        self._ask(asked)
        for channel in touched:
            self._answer(channel)
        self._limit_open_calls()

    def _take(self, event: MessageReceived) -> _PeerCall:
        request = _PeerCall(event.channel, event.sequence)
        self._requests.setdefault(event.channel, deque()).append(request)
        try:
            request.envelope = from_parts(event.parts, self.origin)
        except InvalidEnvelope as error:
            self._finish(request, failure_parts(error))
        return request

    def _finish(self, request: _PeerCall, answer: Parts) -> None:
        try:
            self.require_room(answer)
        except TooLargeToSend as error:
            answer = failure_parts(InvalidEnvelope(f"the answer can't be sent: {error}"))
        request.answer = answer
        self._answer_bytes += _size(answer)

    def _ask(self, asked: list[_PeerCall]) -> None:
        """Those of one read together, unless they want to be waited for in their own way."""
        plain: list[Envelope] = []
        now = self.context.now()
        for request in asked:
            if request.envelope is None:
                continue
            try:
                timeout_s = timeout_of(request.envelope)
            except InvalidEnvelope as error:
                self._finish(request, failure_parts(error))
                continue
            self._asked[id(request.envelope)] = request
            if timeout_s is None:
                plain.append(request.envelope)
            else:
                self._call([request.envelope], now, timeout_s)
        if plain:
            self._call(plain, now, None)

    def _call(self, envelopes: list[Envelope], now: float, timeout_s: float | None) -> None:
        calls = self.hub.call(
            envelopes,
            now,
            answered=guarded(self._on_answer, self.broken),
            peer=self.peer,
            timeout_s=timeout_s,
        )
        for call in calls:
            request = self._asked.get(id(call.envelope))
            if request is not None:
                request.call = call

    def _on_answer(self, call: Call, answer: Answer) -> None:
        request = self._asked.pop(id(call.envelope), None)
        if request is None or self.forgotten:
            return
        if isinstance(answer, CrosswireError):
            self._finish(request, failure_parts(answer))
        else:
            self._finish(request, to_parts(self.context.schemas.answer(call.envelope, answer)))
        request.call = None
        if self._answer_bytes > self.limits.unconsumed_bytes:
            self.end(LimitExceeded("too much was answered that the caller does not consume"))
            return
        self._answer(request.channel)
        self._limit_open_calls()

    def _answer(self, channel: int) -> None:
        """Send what is answered on a channel, up to the first that is not."""
        requests = self._requests.get(channel)
        out = self.outbound.setdefault(channel, Outbound())
        answers: list[Parts] = []
        sequence = 0
        room = 0 if out.closing else self.limits.window - out.outstanding
        while requests and requests[0].answer is not None and len(answers) < room:
            request = requests.popleft()
            answers.append(request.answer or ())
            sequence = request.sequence
        closes = channel in self._closing and not requests and not out.closing
        if not requests:
            self._requests.pop(channel, None)
        if not answers and not closes:
            return
        state = self.link.copy_channel(channel)
        if answers:
            self.plan(channel, [SentRun("", parts=answers)], len(answers), sum(map(_size, answers)))
            if state is not None:
                state.consume(sequence)
        if closes:
            self._close(channel, out, state)
        if state is not None:
            self.save_receiving(channel, state)
        self.once_written(lambda: self._reply(channel, answers, state, closes))

    def _close(self, channel: int, out: Outbound, state: ReceivingChannel | None) -> None:
        """The peer asks no more on this channel; so there are no more answers on ours."""
        self._closing.discard(channel)
        if state is not None:
            state.finish()
        if out.next:
            out.closing = True
            self.rows.save_marks(channel, out)
        elif not out.reopened:
            del self.outbound[channel]

    def _on_closed(self, channel: int) -> None:
        """Ours may be opened again; that it was open once is remembered as long as a link does."""
        out = self.outbound[channel]
        if not out.reopened:
            self._used.append(channel)
        self.outbound[channel] = out = Outbound(reopened=True)
        self.rows.save_marks(channel, out)
        while len(self._used) > 2 * self.limits.channels:
            oldest = self._used.popleft()
            if not self.outbound[oldest].next:
                del self.outbound[oldest]
                self.rows.drop_marks(oldest)

    def _reply(
        self, channel: int, answers: list[Parts], state: ReceivingChannel | None, closes: bool
    ) -> None:
        link = self.link
        if link.ended:
            return
        if state is not None and link.is_receiving(channel):
            link.adopt(channel, state)
        if answers:
            self.send(channel, answers)
        out = self.outbound.get(channel)
        if closes and out is not None and out.closing and not link.shut_down:
            link.close(channel)

    def _shut_down(self) -> None:
        """It wants no more answers: what it asked for is given up, and consumed."""
        self._cancel()
        last = {channel: each[-1].sequence for channel, each in self._requests.items()}
        self._requests.clear()
        states = {}
        for channel, sequence in last.items():
            state = self.link.copy_channel(channel)
            if state is not None:
                state.consume(sequence)
                states[channel] = state
                self.save_receiving(channel, state)

        def adopt() -> None:
            if not self.link.ended:
                for channel, state in states.items():
                    self.link.adopt(channel, state)

        if states:
            self.once_written(adopt)
        self.link.shutdown()

    def _limit_open_calls(self) -> None:
        """Calls that nobody has answered yet are bounded; each of them ends in time."""
        self.hold(len(self._asked) > _OPEN_CALLS)

    def _cancel(self) -> None:
        calls = [each.call for each in self._asked.values() if each.call is not None]
        self._asked.clear()
        self.hub.cancel(calls, self.context.now())


class ServeEnd(LinkEnd):
    """The peer serves. Requests go out on as many channels as there are calls at a time."""

    provider: Provider | None = None

    def attach(self) -> None:
        channels = min(256**self.head.terms.listener_id_size, _PROVIDER_CALLS)
        self._free: deque[int] = deque(range(channels))
        self._asked: dict[int, deque[int]] = {}
        self._where: dict[int, int] = {}
        self._owed = channels
        self._window = Window(0, granted=True)

    def restored(self, loaded: LoadedLink) -> None:
        """What was asked before the restart may still be answered, and nobody waits for it."""
        del loaded
        for channel, out in self.outbound.items():
            waiting = out.next - out.answered
            if waiting > 0:
                self._asked[channel] = deque([0] * waiting)
                self._free.remove(channel)

    @property
    def is_busy(self) -> bool:
        return bool(self._where) or super().is_busy

    def joined(self) -> None:
        if self.provider is None:
            self.provider = self.hub.provide(
                [self.endpoint.destination],
                self,
                self.context.now(),
                peer=self.peer,
                window=self._window,
            )
        self.provider.peer = self.peer
        self.steer()

    def left(self) -> None:
        self.steer()

    def steer(self) -> None:
        """Calls go to a provider that is there and reads; those that it has stay with it."""
        window = self._window
        if self.gateway is not None and not self.gateway.session.congested:
            if self._owed:
                count, self._owed = self._owed, 0
                window.grant(count, self.context.now())
        elif window.free > 0:
            self._owed += window.free
            window.free = 0

    def ended(self) -> None:
        if self.provider is not None:
            self.provider.close(self.context.now())

    # Requests.

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        now = self.context.now()
        for delivery in requests:
            parts = to_parts(delivery.envelope)
            try:
                self.require_room(parts)
            except TooLargeToSend as error:
                cause = f"too large for Relink: {error}"
                provider.fail(delivery.id, ProviderFailed("invalid_request", cause), now)
                self._grant_credit()
                continue
            channel = self._pick()
            out = self.outbound.get(channel)
            if out is not None and out.outstanding >= self.limits.window:
                if channel not in self._asked:
                    self._free.append(channel)
                provider.fail(delivery.id, ProviderFailed("refused", "it is too busy"), now)
                self._grant_credit()
                continue
            self._asked.setdefault(channel, deque()).append(delivery.id)
            self._where[delivery.id] = channel
            self._post(channel, parts)

    def _pick(self) -> int:
        """A channel without a call; where calls were given up, the one with the fewest."""
        if self._free:
            return self._free.popleft()
        return min(self._asked, key=lambda channel: len(self._asked[channel]))

    def _post(self, channel: int, parts: Parts) -> None:
        self.plan(channel, [SentRun("", parts=[parts])], 1, _size(parts))
        self.once_written(lambda: self.send(channel, [parts]))

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        """Relink has no word for it: the answer, if there is one, will be dropped."""
        del provider
        for identifier in ids:
            channel = self._where.pop(identifier, None)
            if channel is not None:
                asked = self._asked[channel]
                asked[asked.index(identifier)] = 0
                self._grant_credit()

    def _grant_credit(self) -> None:
        self._owed += 1
        self.steer()

    # Answers.

    def receive(self, events: list[Event]) -> None:
        last: dict[int, int] = {}
        answers: list[tuple[int, MessageReceived]] = []
        closed: list[int] = []
        for event in events:
            if type(event) is MessageReceived:
                asked = self._asked.get(event.channel)
                if not asked:
                    self.end(UnexpectedFrame("an answer to nothing"))
                    return
                last[event.channel] = event.sequence
                answers.append((asked.popleft(), event))
                self.outbound[event.channel].answered += 1
                if not asked:
                    del self._asked[event.channel]
                    self._free.append(event.channel)
            elif type(event) is Acknowledged:
                if event.acknowledgement == "consumed":
                    self.done(event.channel, (event.last - event.first) % (1 << 32) + 1)
            elif type(event) is CloseReceived:
                closed.append(event.channel)
            elif type(event) is ShutdownReceived:
                self.ended()
                self.link.shutdown()
        if last or closed:
            self._acknowledge(last, closed)
        for identifier, event in answers:
            if identifier and self._where.pop(identifier, None) is not None:
                self._hand_over(identifier, event)
                self._grant_credit()

    def _acknowledge(self, last: dict[int, int], closed: list[int]) -> None:
        states: dict[int, ReceivingChannel] = {}
        for channel in dict.fromkeys([*last, *closed]):
            state = self.link.copy_channel(channel)
            if state is None:
                continue
            if channel in last:
                state.consume(last[channel])
            if channel in closed:
                state.finish()
            states[channel] = state
            self.save_receiving(channel, state)
            self.rows.save_marks(channel, self.outbound[channel])

        def adopt() -> None:
            if not self.link.ended:
                for channel, state in states.items():
                    self.link.adopt(channel, state)

        self.once_written(adopt)

    def _hand_over(self, identifier: int, event: MessageReceived) -> None:
        provider, now = self.provider, self.context.now()
        assert provider is not None
        origin = Origin("", "response", self.origin.connection, self.head.principal)
        try:
            envelope = from_parts(event.parts, origin)
        except InvalidEnvelope as error:
            provider.fail(identifier, ProviderFailed("invalid_response", str(error)), now)
            return
        failure = failure_of(envelope)
        if failure is not None:
            provider.fail(identifier, failure, now)
        else:
            provider.answer(identifier, envelope, now)
