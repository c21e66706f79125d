"""Relink's callers and providers: a request on channel N is answered on channel N, in order.

Requests and answers leave when they are written, so that none is sent twice: a hub that was killed
calls again for requests without an answer, and drops answers that nobody waits for.
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
from crosswire.gateways.relink.link_end import LinkEnd, LinkWindow
from crosswire.gateways.relink.link_records import LoadedLink, Outbound, Parts, SentRun
from crosswire.gateways.relink.messages import (
    Origin,
    count_of,
    failure_of,
    failure_parts,
    from_parts,
    timeout_of,
    to_parts,
)
from crosswire.hub.attachment import Delivery
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
"""Calls of one peer that may be without an answer: above this it is not read from."""
_PROVIDER_CALLS: Final = 256
"""Calls that one provider may have at a time, each on a channel of its own."""


def _size(parts: Sequence[bytes]) -> int:
    return sum(map(len, parts))


class _PeerCall:
    """A call of the peer; its answer once there is one."""

    __slots__ = ("answer", "call", "channel", "envelope", "sequence")

    def __init__(self, channel: int, sequence: int) -> None:
        self.channel = channel
        self.sequence = sequence
        self.envelope: Envelope | None = None
        self.call: Call | None = None
        self.answer: Parts | None = None


class CallEnd(LinkEnd):
    """The peer calls. A request is acknowledged, as received and consumed, with its answer."""

    def attach(self) -> None:
        """Nothing of the hub is needed before a request arrives."""
        self._requests: dict[int, deque[_PeerCall]] = {}
        self._open: dict[int, _PeerCall] = {}
        """Calls in the hub, by the identity of their envelope: it has no id before it is called."""
        self._answer_bytes = 0
        self._closing: set[int] = set()
        self._used: deque[int] = deque()

    def restored(self, loaded: LoadedLink) -> None:
        """Count the answers that the caller has not consumed."""
        del loaded
        for channel, out in self.outbound.items():
            self._answer_bytes += sum(row[2] for row in out.rows)
            if out.reopened:
                self._used.append(channel)

    @property
    def is_busy(self) -> bool:
        """Whether calls are without an answer."""
        return bool(self._open) or super().is_busy

    def ended(self) -> None:
        """Cancel the calls that are not answered."""
        self._cancel()

    def receive(self, events: list[Event]) -> None:
        """Make the calls of one read, then send the answers that have room now."""
        calls: list[_PeerCall] = []
        touched: dict[int, None] = {}
        for event in events:
            if type(event) is MessageReceived:
                calls.append(self._take(event))
                touched[event.channel] = None
            elif type(event) is Acknowledged:
                if event.acknowledgement == "consumed":
                    self._answer_bytes -= self.done(event.channel, count_of(event))
                    touched[event.channel] = None
            elif type(event) is CloseReceived:
                self._closing.add(event.channel)
                touched[event.channel] = None
            elif type(event) is ChannelClosed:
                self._on_closed(event.channel)
                touched[event.channel] = None
            elif type(event) is ShutdownReceived:
                # The calls of this read are not made: the peer does not wait for their answers.
                self._shut_down()
                return
        self._call_all(calls)
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
        """Keep the answer until those before it on its channel are sent."""
        try:
            self.require_room(answer)
        except TooLargeToSend as error:
            answer = failure_parts(InvalidEnvelope(f"the answer can't be sent: {error}"))
        request.answer = answer
        self._answer_bytes += _size(answer)

    def _call_all(self, requests: list[_PeerCall]) -> None:
        """Call the hub once for the requests of one read; those with a timeout one by one."""
        plain: list[Envelope] = []
        now = self.context.now()
        for request in requests:
            if request.envelope is None:
                continue
            try:
                timeout_s = timeout_of(request.envelope)
            except InvalidEnvelope as error:
                self._finish(request, failure_parts(error))
                continue
            # Before the call: it may be answered before `hub.call` returns.
            self._open[id(request.envelope)] = request
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
            request = self._open.get(id(call.envelope))
            if request is not None:
                request.call = call

    def _on_answer(self, call: Call, answer: Answer) -> None:
        request = self._open.pop(id(call.envelope), None)
        # The link may have been forgotten or shut down while its request was in the hub.
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
        """Send the answers of a channel, in the order of requests, up to the first missing one."""
        requests = self._requests.get(channel)
        out = self.outbound.setdefault(channel, Outbound())
        answers: list[Parts] = []
        sequence = 0
        # Answers beyond the window wait here, on a channel that closes until it is open again.
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
        # The answers and the acknowledgement of their requests are written together: a hub that is
        # killed before calls again, one that is killed after repeats the answers.
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
        """Close our channel: the peer closed its own, and all requests on it are answered."""
        self._closing.discard(channel)
        if state is not None:
            state.finish()
        if out.next:
            out.closing = True
            self.rows.save_marks(channel, out)
        elif not out.reopened:
            del self.outbound[channel]

    def _on_closed(self, channel: int) -> None:
        """Our channel may be opened again.

        That it was open once is kept as long as the wire's link keeps it: twice the channels.
        """
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
        # The channel may have been closed by another action of the same write.
        if state is not None and link.is_receiving(channel):
            link.adopt(channel, state)
        if answers:
            self.send(channel, answers)
        out = self.outbound.get(channel)
        if closes and out is not None and out.closing and not link.shut_down:
            link.close(channel)

    def _shut_down(self) -> None:
        """Cancel all calls and acknowledge them as consumed: the peer wants no more answers."""
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
        if states:
            self.once_written(lambda: self.adopt(states))
        self.link.shutdown()

    def _limit_open_calls(self) -> None:
        """Stop reading while too many calls are open; each of them ends by its timeout."""
        self.hold(len(self._open) > _OPEN_CALLS)

    def _cancel(self) -> None:
        calls = [each.call for each in self._open.values() if each.call is not None]
        self._open.clear()
        self.hub.cancel(calls, self.context.now())


class ServeEnd(LinkEnd):
    """The peer serves. Each call that is under way has a channel of its own."""

    provider: Provider | None = None

    def attach(self) -> None:
        """Prepare the channels; it serves from its first connection on."""
        channels = min(256**self.head.terms.listener_id_size, _PROVIDER_CALLS)
        self._free: deque[int] = deque(range(channels))
        self._awaited: dict[int, deque[int]] = {}
        """Message ids of the calls on a channel, in order; 0 for one that nobody waits for."""
        self._channels: dict[int, int] = {}
        """The channel of each call that somebody waits for."""
        self._room = LinkWindow(channels)

    def restored(self, loaded: LoadedLink) -> None:
        """Expect answers to calls from before the restart, which nobody waits for any more."""
        del loaded
        for channel, out in self.outbound.items():
            waiting = out.next - out.answered
            if waiting > 0:
                self._awaited[channel] = deque([0] * waiting)
                self._free.remove(channel)

    @property
    def is_busy(self) -> bool:
        """Whether it has calls that it has not answered."""
        return bool(self._channels) or super().is_busy

    def joined(self) -> None:
        """Serve from the first connection on."""
        if self.provider is None:
            self.provider = self.hub.provide(
                [self.endpoint.destination],
                self,
                self.context.now(),
                peer=self.peer,
                window=self._room.window,
            )
        self.provider.peer = self.peer
        self.steer()

    def left(self) -> None:
        """Give it no calls until it is connected again."""
        self.steer()

    def steer(self) -> None:
        """Give it calls only while it is connected and reads; those that it has stay with it."""
        can_send = self.gateway is not None and not self.gateway.session.congested
        self._room.steer(can_send, self.context.now())

    def ended(self) -> None:
        """Its calls fail as lost."""
        if self.provider is not None:
            self.provider.close(self.context.now())

    # Requests.

    def request(self, provider: Provider, requests: list[Delivery]) -> None:
        """Send calls, once they are written."""
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
                # The peer doesn't acknowledge the requests that it was sent.
                if channel not in self._awaited:
                    self._free.append(channel)
                provider.fail(
                    delivery.id, ProviderFailed("refused", "the provider is too busy"), now
                )
                self._grant_credit()
                continue
            self._awaited.setdefault(channel, deque()).append(delivery.id)
            self._channels[delivery.id] = channel
            self._post(channel, parts)

    def _pick(self) -> int:
        """A channel without a call. There may be none after calls that were cancelled and are
        still not answered: then the one with the fewest."""
        if self._free:
            return self._free.popleft()
        return min(self._awaited, key=lambda channel: len(self._awaited[channel]))

    def _post(self, channel: int, parts: Parts) -> None:
        self.plan(channel, [SentRun("", parts=[parts])], 1, _size(parts))
        self.once_written(lambda: self.send(channel, [parts]))

    def cancel(self, provider: Provider, ids: list[int]) -> None:
        """Drop the answers of these calls when they come: Relink can't cancel a request."""
        del provider
        for identifier in ids:
            channel = self._channels.pop(identifier, None)
            if channel is not None:
                # Its answer will still come, in its turn: keep the position, without a call.
                awaited = self._awaited[channel]
                awaited[awaited.index(identifier)] = 0
                self._grant_credit()

    def _grant_credit(self) -> None:
        self._room.free(1)
        self.steer()

    # Answers.

    def receive(self, events: list[Event]) -> None:
        """Answer calls; each answer is for the oldest request on its channel."""
        last: dict[int, int] = {}
        answers: list[tuple[int, MessageReceived]] = []
        closed: list[int] = []
        for event in events:
            if type(event) is MessageReceived:
                awaited = self._awaited.get(event.channel)
                if not awaited:
                    self.end(UnexpectedFrame("an answer without a request"))
                    return
                last[event.channel] = event.sequence
                # Answers carry no id: each belongs to the oldest request on its channel.
                answers.append((awaited.popleft(), event))
                self.outbound[event.channel].answered += 1
                if not awaited:
                    del self._awaited[event.channel]
                    self._free.append(event.channel)
            elif type(event) is Acknowledged:
                if event.acknowledgement == "consumed":
                    self.done(event.channel, count_of(event))
            elif type(event) is CloseReceived:
                closed.append(event.channel)
            elif type(event) is ShutdownReceived:
                self.ended()
                self.link.shutdown()
        if last or closed:
            self._acknowledge(last, closed)
        # After the loop: an answer may cause the next call, which takes a channel.
        for identifier, event in answers:
            if identifier and self._channels.pop(identifier, None) is not None:
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
        self.once_written(lambda: self.adopt(states))

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
