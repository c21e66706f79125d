"""A leader's groups on the model log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import pytest

from crosswire.commitlog.body import RecordedBody, read_body
from crosswire.commitlog.contract import CommitGroup
from crosswire.commitlog.leader import LeaderLog
from crosswire.commitlog.model import ModelFault, ModelServers, model_log
from crosswire.commitlog.records import (
    LEAST_RECORD_BYTES,
    Genesis,
    GroupAssembler,
    HandOver,
    LogRecord,
    RecordChain,
    RecordKind,
    RecordPosition,
    Takeover,
    decode_record,
)
from crosswire.errors import LogConflict, LogError, StoreDamaged, StoreError, StoreFull

LOG = b"l" * 16


class Target:
    def __init__(self) -> None:
        self.applied: list[tuple[bytes, RecordPosition]] = []
        self.error: StoreError | None = None
        self.damage: StoreError | None = None
        self.passed: RecordPosition | None = None

    def check_intact(self) -> None:
        if self.damage is not None:
            raise self.damage

    def pass_over(self, position: RecordPosition) -> None:
        self.passed = position

    def apply_group(self, group: CommitGroup, body: bytes, position: RecordPosition) -> None:
        if self.error is not None:
            raise self.error
        self.applied.append((body, position))


class Leader:
    """A leader of a log on model servers, and what became of it."""

    def __init__(self) -> None:
        self.servers = ModelServers()
        self.log = model_log(self.servers)
        self.chain = RecordChain(LOG, b"w" * 16, record_bytes=LEAST_RECORD_BYTES)
        self.target = Target()
        self.ended: asyncio.Future[LogError | StoreError] = (
            asyncio.get_running_loop().create_future()
        )
        self.times = count(100)
        self.commits = LeaderLog(
            self.log,
            self.chain,
            self.target,
            self.times.__next__,
            self.ended.set_result,
            heartbeat_s=60,
            clock=lambda: float(self.servers.operations),
        )

    async def start(self) -> None:
        await self.log.create(self.chain.genesis(Genesis("n"), 1))
        await self.log.open()
        await self.log.append(self.chain.takeover(Takeover("a"), 2))
        self.commits.start(asyncio.get_running_loop())

    def records(self) -> list[LogRecord]:
        return [decode_record(data) for data in self.servers.records]


@pytest.fixture
async def leader() -> AsyncIterator[Leader]:
    made = Leader()
    await made.start()
    yield made
    made.commits.stop()


def group(value: bytes = b"value") -> CommitGroup:
    body = RecordedBody()
    body.put(b"key", value)
    return CommitGroup(body)


async def test_a_group_is_in_the_log_and_applied_when_its_append_is_done(leader: Leader) -> None:
    append = leader.commits.append(group())
    assert not append.done and leader.target.applied == []
    await append
    newest = leader.records()[-1]
    assert newest.kind is RecordKind.GROUP and newest.time_us == 100
    assert list(read_body(newest.body)) == [(1, b"key", b"value")]
    assert leader.target.applied == [(newest.body, newest.position)]
    assert leader.commits.confirmed_at == leader.servers.operations


async def test_a_large_group_is_applied_once_with_the_position_of_its_last_part(
    leader: Leader,
) -> None:
    await leader.commits.append(group(b"x" * 3 * LEAST_RECORD_BYTES))
    parts = leader.records()[2:]
    assert [each.part for each in parts] == [1, 2, 3, 4]
    assembler = GroupAssembler()
    bodies = [assembler.add(each) for each in parts]
    assert leader.target.applied == [(bodies[-1], parts[-1].position)]


async def test_nothing_is_applied_while_the_outcome_is_not_known(leader: Leader) -> None:
    leader.servers.rates[ModelFault.NOT_COPIED] = 1.0
    append = leader.commits.append(group())
    while leader.servers.head.number < 3 or not leader.log.trouble:
        await asyncio.sleep(0)
    assert not append.done and leader.target.applied == []
    leader.servers.rates.clear()
    await append
    assert len(leader.target.applied) == 1


async def test_a_leader_that_was_replaced_answers_nothing_more(leader: Leader) -> None:
    other = model_log(leader.servers)
    await other.open()
    chain = RecordChain(LOG, b"x" * 16, position=leader.chain.position)
    await other.append(chain.takeover(Takeover("b"), 3))
    append = leader.commits.append(group())
    assert isinstance(await leader.ended, LogConflict)
    assert not append.done and leader.target.applied == []


async def test_a_durable_group_that_can_not_be_applied_ends_the_leader(leader: Leader) -> None:
    leader.target.error = StoreFull("no room")
    append = leader.commits.append(group())
    assert await leader.ended is leader.target.error
    assert not append.done
    assert leader.records()[-1].kind is RecordKind.GROUP


async def test_nothing_of_a_damaged_store_gets_into_the_log(leader: Leader) -> None:
    leader.target.damage = StoreDamaged("a table can't be read")
    before = leader.records()
    append = leader.commits.append(group())
    assert await leader.ended is leader.target.damage
    assert not append.done and leader.records() == before


async def test_other_records_come_between_groups(leader: Leader) -> None:
    append = leader.commits.append(group())
    record = await leader.commits.add(lambda chain, time: chain.hand_over(HandOver("b"), time))
    assert append.done
    assert [each.kind for each in leader.records()[2:]] == [
        RecordKind.GROUP,
        RecordKind.HAND_OVER,
    ]
    assert leader.records()[-1] == record
    assert leader.target.passed == record.position


async def test_a_heartbeat_is_appended_when_nothing_else_is() -> None:
    leader = Leader()
    leader.commits._heartbeat_s = 0.001
    await leader.start()
    while len(leader.records()) < 5:
        await asyncio.sleep(0)
    leader.commits.stop()
    assert {each.kind for each in leader.records()[2:]} == {RecordKind.HEARTBEAT}


async def test_nothing_is_appended_without_the_event_loop(leader: Leader) -> None:
    with pytest.raises(RuntimeError, match="event loop only"):
        leader.commits.append(group(), blocking=True)
