"""Bugs that a careless engineer could make: small edits of the hub's own source code.

Each is a piece of text in one function and what replaces it, so that a bug reads like a change of a
pull request. `plant` compiles the changed function and puts it where the right one was. If the text
is not there any more, planting fails: the bug has to be moved to where the code is now.
"""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, NamedTuple
from unittest import mock

from crosswire.commitlog.leader import LeaderLog
from crosswire.commitlog.local import LocalLog
from crosswire.commitlog.replicated import EngineLog, _EngineReader
from crosswire.gateways.emp.gateway import EmpGateway
from crosswire.gateways.emqp.clients import PublisherGateway
from crosswire.gateways.emqp.workers import WorkerGateway
from crosswire.gateways.epoxy.gateway import EpoxyGateway
from crosswire.gateways.gateway import Gateway
from crosswire.gateways.micromsg2.intake import MessageIntake
from crosswire.gateways.micromsg2.outbox import Outbox
from crosswire.gateways.relink.consumers import ConsumeEnd
from crosswire.gateways.relink.producers import ProduceEnd
from crosswire.hub.backlog import backlog
from crosswire.hub.backlog.backlog import Backlog
from crosswire.hub.backlog.consumers import ConsumerDispatch
from crosswire.hub.backlog.memory import BacklogMemory
from crosswire.hub.backlog.retries import Retries
from crosswire.hub.commits import CommitPath
from crosswire.hub.cursor import Cursor
from crosswire.hub.ingest.staging import Staging
from crosswire.hub.intake import Intake
from crosswire.hub.ledger import Ledger
from crosswire.hub.schedules import Schedules
from crosswire.hub.services import Services
from crosswire.hub.subscriptions import Subscriptions
from crosswire.lake import files
from crosswire.server.lake_feed import LakeFeed
from crosswire.server.replica import Replica
from crosswire.server.server import Server
from crosswire.server.succession import Succession, TrimRule
from crosswire.store import contract
from crosswire.store.contract import Store
from crosswire.store.recovery import RecoveredEngine
from crosswire.store.replica import ReplicaStore

__all__ = ["BUGS", "PlantedBug", "plant"]


class PlantedBug(NamedTuple):
    """A wrong edit: what its author had in mind, and which text of which function it replaces."""

    name: str
    thought: str
    owner: type[Any] | ModuleType
    function: str
    old: str
    new: str
    unseen: str = ""
    """Why it breaks no promise, if that is so: it is planted, and not counted."""
    unreached: str = ""
    """What the simulation would need to show it, if that is known."""


@contextmanager
def plant(bug: PlantedBug) -> Iterator[None]:
    """The bug is in the code as long as this lasts. Raises ValueError if its text is not there."""
    with mock.patch.object(bug.owner, bug.function, _changed(bug)):
        yield


def _changed(bug: PlantedBug) -> Any:
    right = getattr(bug.owner, bug.function)
    source = textwrap.dedent(inspect.getsource(right))
    if source.count(bug.old) != 1:
        raise ValueError(f"{bug.name}: {right.__qualname__} has not {bug.old!r} once")
    is_class = isinstance(bug.owner, type)
    module = sys.modules[bug.owner.__module__] if is_class else bug.owner
    code = compile(
        source.replace(bug.old, bug.new),
        f"<{bug.name}>",
        "exec",
        flags=__future__.annotations.compiler_flag,
    )
    made: dict[str, Any] = {}
    # A function's globals are its module's: what the bug's code uses is what the right code uses.
    exec(code, vars(module), made)
    return made[bug.function]


_COMMIT: Final = [
    PlantedBug(
        "acknowledge before the commit",
        "The group is on its way, so producers need not wait for the disk.",
        Intake,
        "produce",
        "        self._store.group.receipts.append(receipt)\n        self._commits.request()",
        "        self._commits.request()\n        receipt.finish()",
    ),
    PlantedBug(
        "deliver before the commit",
        "Consumers get a message at once: it is written anyway.",
        Intake,
        "_send",
        "    if cut and (queue.waiting or not queue.has_space_for(len(run))):\n        cut = 0",
        "    cut = count",
    ),
    PlantedBug(
        "forget to sync",
        "A write is enough: the operating system has it.",
        LocalLog,
        "append",
        "if not group.sync:",
        "if group.number:",
    ),
    PlantedBug(
        "swallow a sync error",
        "The next sync will bring it to the disk.",
        LocalLog,
        "_sync",
        "return error",
        "pass",
    ),
    PlantedBug(
        "swallow a write error",
        "An append that ended is an append that worked.",
        LocalLog,
        "append",
        "append.finish(error)",
        "append.finish()",
    ),
    PlantedBug(
        "acknowledge a failed group",
        "Whoever waits for a group is called when it has ended.",
        CommitPath,
        "_refuse",
        "self.finish(receipt, refused)",
        "self.finish(receipt)",
    ),
    PlantedBug(
        "lose retained messages of a failed group",
        "What could not be written is withdrawn.",
        CommitPath,
        "_withdraw",
        "following.retained_arrivals[backlog] = retained",
        "pass",
    ),
    PlantedBug(
        "lose saved values of a failed group",
        "The next group saves what has changed.",
        Store,
        "take_back",
        "following.saves = {**kept, **following.saves}",
        "pass",
    ),
    PlantedBug(
        "keep old values of a failed group",
        "Merging two dictionaries: which one wins?",
        Store,
        "take_back",
        "{**kept, **following.saves}",
        "{**following.saves, **kept}",
    ),
    PlantedBug(
        "keep messages of a failed group",
        "They were not written, so there is nothing to delete.",
        Store,
        "take_back",
        "[*group.ranges, *group.appended]",
        "[*group.ranges]",
    ),
    PlantedBug(
        "no retry of a failed group",
        "The next message will start the next commit.",
        CommitPath,
        "_continue",
        "self._timer = self._timer or self._loop.call_later(_RETRY_S, self._begin)",
        "pass",
        unreached="nobody who uses the hub after the failure: every call begins a commit",
    ),
    PlantedBug(
        "save one backlog in a group",
        "A group has the settlements of the queue that asked for it.",
        CommitPath,
        "_seal",
        "self._write(changed)",
        "self._write(list(changed)[:1])",
    ),
    PlantedBug(
        "forget what was collected meanwhile",
        "Whoever has changes asks for a commit.",
        CommitPath,
        "_continue",
        "elif group.urgent or group.has_changes:",
        "elif False:",
    ),
    PlantedBug(
        "forget who waits to read",
        "A backlog reads when it is dispatched.",
        CommitPath,
        "_release",
        "dispatch.touch(reader)",
        "pass",
    ),
]

_STORE: Final = [
    PlantedBug(
        "give ids twice",
        "The next id follows the last one that was written.",
        Store,
        "seal",
        "group.reserved_id = self._next_id + self._id_block",
        "group.reserved_id = max(self._next_id - 40, 1)",
        unseen="an id above what is reserved is not used before more are reserved",
    ),
    PlantedBug(
        "give ids of messages that were not stored twice",
        "The next id follows the last one that was written.",
        RecoveredEngine,
        "_recover",
        'self._next_id = int.from_bytes(own.get(b"!ids", b"\\x01"))',
        "self._next_id = 1",
    ),
    PlantedBug(
        "skip the rest of a page",
        "A page ends where the caller asked it to end.",
        contract,
        "_page",
        "return Page(records, records[-1][1])",
        "return Page(records, upto)",
    ),
    PlantedBug(
        "number journal rows wrongly",
        "A group is one entry of the journal.",
        Store,
        "applied",
        "self._next_row += group.block.rows",
        "self._next_row += 1",
    ),
    PlantedBug(
        "overwrite the last record of a run",
        "Ids of a run go from the first to the last.",
        Store,
        "append_run",
        "keys = map(add, repeat(message_key(number, at)[:-1]), _LAST_BYTES[low:high])",
        "keys = map(add, repeat(message_key(number, at)[:-1]),"
        " [*_LAST_BYTES[low:high - 1], _LAST_BYTES[max(high - 2, low)]])",
    ),
]

_HUB: Final = [
    PlantedBug(
        "skip the cursor",
        "What is settled is no longer in memory.",
        Backlog,
        "_remove_from_memory",
        "    self.cursor.settle(*ids)\n",
        "",
    ),
    PlantedBug(
        "move the head too far",
        "The head is the first that is not settled: start after it.",
        Cursor,
        "write_changes",
        "_Change(head, ",
        "_Change(head + 1, ",
    ),
    PlantedBug(
        "forget what is open in a snapshot",
        "Everything up to here is settled.",
        Cursor,
        "write_snapshot",
        "_Snapshot(upto, opened, ",
        "_Snapshot(upto, [], ",
    ),
    PlantedBug(
        "redeliver what was settled out of order",
        "The head says what is settled.",
        Cursor,
        "_apply",
        "self.later.add(identifier)",
        "pass",
    ),
    PlantedBug(
        "drop settlements with a snapshot",
        "A snapshot has everything.",
        Cursor,
        "write_changes",
        "self._next_change += 1",
        "pass",
    ),
    PlantedBug(
        "forget attempts at a restart",
        "A new start, a new chance.",
        backlog,
        "recover_unsettled",
        "item.delivered = len(message.attempts)",
        "item.delivered = 0",
    ),
    PlantedBug(
        "forget refusals",
        "Attempts are counted in memory.",
        Retries,
        "_fail_one",
        "    self._cursor.refuse(item.number, item.id, item.attempts)\n",
        "",
    ),
    PlantedBug(
        "allow one attempt too many",
        "Up to `max_attempts` attempts.",
        Retries,
        "_fail_one",
        "0 < owner.retry.max_attempts <= item.delivered",
        "0 < owner.retry.max_attempts < item.delivered",
    ),
    PlantedBug(
        "allow one attempt too few",
        "Attempts are counted from 0.",
        Retries,
        "_fail_one",
        "0 < owner.retry.max_attempts <= item.delivered",
        "0 < owner.retry.max_attempts - 1 <= item.delivered",
    ),
    PlantedBug(
        "forget dead letters",
        "After the last attempt a message is gone.",
        Retries,
        "_bury",
        "    self._send(bury(item.envelope, owner.dead_letters, cause, item.attempts), now)\n",
        "",
    ),
    PlantedBug(
        "keep dead letters in the queue",
        "It has a copy among the dead letters.",
        Retries,
        "_bury",
        "owner.discard(item)",
        "pass",
    ),
    PlantedBug(
        "never retry what is delayed",
        "The timer is set when something is leased.",
        Retries,
        "_fail_one",
        "    self._wake(item.due)\n",
        "",
    ),
    PlantedBug(
        "keep what a consumer had when it leaves",
        "Its messages were delivered.",
        Backlog,
        "detach",
        'self._loop.defer("return", self._return, consumer, held, sorted(held), now, cause)',
        "pass",
    ),
    PlantedBug(
        "return messages in the wrong order",
        "Each goes to the front.",
        Backlog,
        "_return",
        "reversed(ids[-_RETURNED:])",
        "ids[-_RETURNED:]",
    ),
    PlantedBug(
        "return messages to the end",
        "The queue is a deque: append.",
        BacklogMemory,
        "put_back",
        "self.ready.appendleft(item)",
        "self.ready.append(item)",
    ),
    PlantedBug(
        "ignore the window",
        "The loop counts.",
        ConsumerDispatch,
        "_give_some",
        "        free -= 1\n",
        "",
    ),
    PlantedBug(
        "leak the window when messages are settled",
        "Room is given back when a consumer asks for it.",
        Backlog,
        "make_room",
        "consumer.window.free += count",
        "consumer.window.free += count - 1",
    ),
    PlantedBug(
        "no messages for subscriptions without consumers",
        "Nobody is there to take them.",
        Intake,
        "_publish",
        "for subscription in audience.subscriptions:",
        "for subscription in [each for each in audience.subscriptions if each.consumers]:",
    ),
    PlantedBug(
        "never look up the audience again",
        "Who listens to a topic is looked up once.",
        Subscriptions,
        "audience",
        "if known is not None and known.versions == versions:",
        "if known is not None:",
    ),
    PlantedBug(
        "forget subscriptions at a restart",
        "A consumer that comes back makes its subscription anew.",
        Subscriptions,
        "recover",
        "subscription.recover(now)",
        "pass",
    ),
    PlantedBug(
        "leave settlements out of the ledger",
        "The ledger has what is delivered.",
        Backlog,
        "settle",
        "        self.note(Step.SETTLED, now, settled, peer=consumer.peer)\n",
        "",
    ),
    PlantedBug(
        "lose the ledger of a failed group",
        "What failed did not happen.",
        Ledger,
        "failed",
        "self._open[:0] = again",
        "pass",
    ),
    PlantedBug(
        "keep lost messages in the ledger",
        "All steps go into the next group.",
        Ledger,
        "failed",
        "if lost and run.step is Step.ACCEPTED:",
        "if not lost and run.step is Step.ACCEPTED:",
    ),
    PlantedBug(
        "leave calls of a provider that left",
        "The caller has a timeout.",
        Services,
        "detach",
        "self._finish_parts(list(provider.calls.values()), lost, now)",
        "pass",
    ),
]

_GATEWAYS: Final = [
    PlantedBug(
        "all: keep consumers of lost connections",
        "A consumer ends when it unsubscribes.",
        Gateway,
        "_leave",
        'self.hub.defer(f"{self.protocol} detach", each.close, now)',
        "pass",
    ),
    PlantedBug(
        "EMP: answer before the commit",
        "The request is accepted: answer it.",
        EmpGateway,
        "_publish",
        "    self._published.append((answers, receipt))\n"
        "    receipt.add_done_callback(self.owned(self._answer_published))",
        "    for index, answer in enumerate(answers):\n"
        "        self.connection.send_success(answer, b'{\"id\":%d}' % receipt.ids[index])\n"
        "    self.session.wake()",
    ),
    PlantedBug(
        "EMP: answer a failed commit with success",
        "What the hub refuses is in `refused`.",
        EmpGateway,
        "_answer_published",
        "error = receipt.error or receipt.refused.get(index)",
        "error = receipt.refused.get(index)",
    ),
    PlantedBug(
        "EMP: settle what the peer refuses",
        "An answer is an answer.",
        EmpGateway,
        "receive",
        "if event.succeeded and not isinstance(target, Provider):",
        "if not isinstance(target, Provider):",
    ),
    PlantedBug(
        "EMP: drop deliveries before the subscription is confirmed",
        "The peer does not know the number yet.",
        EmpGateway,
        "deliver",
        "self._early.setdefault(attachment, []).extend(deliveries)",
        "pass",
    ),
    PlantedBug(
        "eMQP: receipt before the commit",
        "The hub has it.",
        PublisherGateway,
        "_accepted",
        "if done or not envelope.durable:",
        "if done or identifier:",
    ),
    PlantedBug(
        "eMQP: receipt for a failed commit",
        "The commit has ended.",
        PublisherGateway,
        "_on_commit",
        "if receipt.error is not None:",
        "if receipt.error is not None and self.left:",
    ),
    PlantedBug(
        "eMQP: settle when a job is sent",
        "The worker has it.",
        WorkerGateway,
        "deliver",
        "if options.awaits_outcome:",
        "if options.awaits_outcome and options.wants_reply:",
    ),
    PlantedBug(
        "eMQP: forget a slot",
        "One READY, one job.",
        WorkerGateway,
        "_offer",
        "self._window.grant(slots, now)",
        "self._window.grant(min(slots, 1), now)",
    ),
    PlantedBug(
        "eMQP: count slots twice",
        "A reply frees a slot, too.",
        WorkerGateway,
        "receive",
        "self._offer(slots, now)",
        "self._offer(slots + sum(map(len, settled.values())), now)",
    ),
    PlantedBug(
        "Epoxy: answer before the commit",
        "Produce, then answer.",
        EpoxyGateway,
        "_produce",
        "self.produce(batch).add_done_callback(self.owned(stored))",
        "stored(self.produce(batch))",
    ),
    PlantedBug(
        "Epoxy: answer a failed commit with success",
        "What the hub refuses is in `refused`.",
        EpoxyGateway,
        "_answer_published",
        "error = receipt.error or receipt.refused.get(index)",
        "error = receipt.refused.get(index)",
    ),
    PlantedBug(
        "Epoxy: settle what the peer refuses",
        "`Settle` settles.",
        EpoxyGateway,
        "_settle",
        "if parsed.refused:",
        "if parsed.refused and not parsed.reason:",
    ),
    PlantedBug(
        "Epoxy: lose settlements of one read",
        "The last one counts.",
        EpoxyGateway,
        "_settle",
        "subscription.settling.update(dict.fromkeys(ids))",
        "subscription.settling = dict.fromkeys(ids)",
        unreached="a client with several requests to settle at a time, which ours never has",
    ),
    PlantedBug(
        "MicroMsg2: acknowledge before the commit",
        "Acknowledge what was read.",
        MessageIntake,
        "_await",
        "if receipt.done:",
        "if receipt.done or self._has_acks:",
    ),
    PlantedBug(
        "MicroMsg2: acknowledge a failed commit",
        "The receipt is done.",
        MessageIntake,
        "_finish",
        "if receipt.error is not None:",
        "if receipt.error is not None and not self._has_acks:",
    ),
    PlantedBug(
        "MicroMsg2: settle what the peer refuses",
        "An acknowledgement settles.",
        Outbox,
        "acknowledged",
        "if not self._refusals:",
        "if self._has_acks:",
    ),
    PlantedBug(
        "MicroMsg2: send more than the credit",
        "The socket's buffer is large.",
        Outbox,
        "_send",
        "while index < end and len(run) < credit:",
        "while index < end:",
        unreached="messages of several frames, above 1 MiB",
    ),
    PlantedBug(
        "Relink: acknowledge after the write",
        "Written is as good as synced.",
        ProduceEnd,
        "_advance",
        "if receipt is None or receipt.done:",
        "if receipt is None or not receipt.refused:",
    ),
    PlantedBug(
        "Relink: acknowledge a failed commit",
        "The receipt is done.",
        ProduceEnd,
        "_committed",
        "if receipt.error is None:",
        "if receipt.done:",
    ),
    PlantedBug(
        "Relink: forget what a channel has received",
        "The peer numbers its messages.",
        ProduceEnd,
        "_save_states",
        "self.save_receiving(channel, state)",
        "pass",
    ),
    PlantedBug(
        "Relink: settle what the peer rolls back",
        "An acknowledgement settles.",
        ConsumeEnd,
        "receive",
        '(refused if kind == "uncommitted" else settled).extend(ids)',
        "settled.extend(ids)",
    ),
    PlantedBug(
        "Relink: leak the window",
        "`done` frees the room.",
        ConsumeEnd,
        "_finish",
        "self._room.free(count)",
        "self._room.free(count - 1)",
    ),
    PlantedBug(
        "Relink: forget what a link holds at a restart",
        "The hub delivers again what is not settled.",
        ConsumeEnd,
        "_attach",
        "holding=list(self._ids),\n        )\n    return hub",
        "holding=(),\n        )\n    return hub",
    ),
]

_REPLICAS: Final = [
    PlantedBug(
        "replicas: take a lost answer for success",
        "It was offered, so it is there.",
        EngineLog,
        "_offer_until_known",
        "if answer.outcome is WriteOutcome.CONFIRMED:",
        "if answer.outcome is not WriteOutcome.REFUSED:",
    ),
    PlantedBug(
        "replicas: believe what can be read",
        "The head is our record: it is durable.",
        EngineLog,
        "_offer_until_known",
        "answer = await engine.confirm(record)",
        "answer = EngineAnswer(WriteOutcome.CONFIRMED)",
    ),
    PlantedBug(
        "replicas: apply what nothing proves",
        "What is in the log is durable.",
        _EngineReader,
        "_page",
        "count = index\n",
        "count = index + 1\n",
    ),
    PlantedBug(
        "replicas: lead without what came before",
        "The takeover is durable: lead.",
        Replica,
        "_take_over",
        "while self.store.position.number < record.number:",
        "while False:",
    ),
    PlantedBug(
        "replicas: answer before the append",
        "The log will have it.",
        LeaderLog,
        "_append_next",
        "        await self._append_group(group)\n        for callback in append.finish():\n"
        "            callback(append)",
        "        for callback in append.finish():\n            callback(append)\n"
        "        await self._append_group(group)",
    ),
    PlantedBug(
        "replicas: apply before the append",
        "Both happen anyway.",
        LeaderLog,
        "_append_group",
        "        await self._append(record)\n    self._target.apply_group(group, body,"
        " self._chain.position)",
        "        self._target.apply_group(group, body, self._chain.position)\n"
        "        await self._append(record)",
    ),
    PlantedBug(
        "replicas: pass over groups of another term",
        "A new leader starts anew.",
        Replica,
        "_apply",
        "if body is not None:",
        "if body is not None and record.term >= self.succession.term:",
    ),
    PlantedBug(
        "replicas: use ids of the last term again",
        "The store knows the next id.",
        ReplicaStore,
        "_recover",
        'self._next_id = int.from_bytes(own[b"!ids"] or b"\\x01")',
        "self._next_id = 1",
    ),
    PlantedBug(
        "replicas: lead on without the log",
        "The log will answer again.",
        Replica,
        "_watch",
        "if self.succession.is_overdue(silent_s):",
        "if False:",
    ),
    PlantedBug(
        "replicas: never take over",
        "The leader will come back.",
        Succession,
        "should_try",
        "return self._named == self._name or self._silent_s >= self._patience_s",
        "return self._named == self._name",
    ),
    PlantedBug(
        "replicas: times of a new leader run back",
        "Every machine has a clock.",
        Replica,
        "_time_us",
        "    self._clock.not_before(self.succession.time_us / MICROSECONDS)\n",
        "",
    ),
    PlantedBug(
        "replicas: write damage to the log",
        "Damage is reported, and the hub goes on.",
        LeaderLog,
        "_append_group",
        "    self._target.check_intact()\n",
        "",
    ),
    PlantedBug(
        "replicas: trim what one replica has",
        "Somebody has it.",
        TrimRule,
        "upto",
        "by_all = synced[-1]",
        "by_all = synced[0]",
    ),
    PlantedBug(
        "replicas: forget the position",
        "The next group has it.",
        ReplicaStore,
        "apply",
        "    self._put_position(batch, position)\n",
        "",
    ),
    PlantedBug(
        "replicas: hand over before the last group",
        "Flush when there is time.",
        Server,
        "_close_term",
        "    await hub.commits.flush()\n",
        "",
        unseen="what is not committed was not confirmed: it is sent, or delivered, once more",
    ),
]

_MORE: Final = [
    PlantedBug(
        "schedules: forget that it has fired",
        "The next due time is in memory.",
        Schedules,
        "_go_on",
        "if kept != schedule:",
        "if kept.paused:",
    ),
    PlantedBug(
        "schedules: count a fire that was refused",
        "It was tried.",
        Schedules,
        "_advance",
        "            self._send(envelope.replace(native=native), now)\n            fired += 1",
        "            fired += 1\n            self._send(envelope.replace(native=native), now)",
        unseen="no limit refuses what a schedule sends",
    ),
    PlantedBug(
        "staging: take all attempts of a batch",
        "A commit is for the batch.",
        Staging,
        "_find",
        "return list(attempts.values())",
        "return list(found.attempts.values())",
    ),
    PlantedBug(
        "staging: do not recognise a batch that is committed",
        "Nobody commits a batch twice.",
        Staging,
        "commit",
        "if self.is_committed(owner, batch, run):",
        "if batch < 0:",
    ),
    PlantedBug(
        "staging: keep no record of a batch",
        "It is done: nobody asks again.",
        Staging,
        "_decide",
        "    self._store.save(_PRODUCERS, _encode(owner), _encode(record))\n",
        "",
    ),
    PlantedBug(
        "lake: publish before the seal",
        "The files are complete.",
        LakeFeed,
        "_seal_some",
        "        await self._hub.seals.save(seal)\n",
        "        await self._in_thread(self._writer.publish, parts)\n"
        "        await self._hub.seals.save(seal)\n        parts = []\n",
    ),
    PlantedBug(
        "lake: do not redo a seal at a start",
        "What is sealed is published.",
        LakeFeed,
        "_publish",
        "self._parts = await self._redo()",
        "self._parts = []",
    ),
    PlantedBug(
        "lake: do not sync the names of files",
        "A rename is enough.",
        files,
        "_sync_dates",
        "sync_folder(folder)",
        "pass",
    ),
]

BUGS: Final = [*_COMMIT, *_STORE, *_HUB, *_GATEWAYS, *_REPLICAS, *_MORE]
"""All of them, by part: commit path, store, hub, gateways, replicas, and what stands on a hub."""
