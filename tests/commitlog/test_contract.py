"""The contract of a replicated log, on every implementation, with the faults that engines have."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from crosswire.commitlog.contract import LogBookmark, ReplicaState
from crosswire.commitlog.records import (
    FORMAT,
    LEAST_RECORD_BYTES,
    ORIGIN,
    GroupAssembler,
    RecordChain,
    RecordPosition,
    Takeover,
    decode_record,
)
from crosswire.errors import (
    LogConflict,
    LogDamaged,
    LogForeign,
    LogNameTaken,
    LogTooNew,
    LogTrimmed,
    LogUnavailable,
    LogUnsafe,
)
from tests.commitlog.harness import WRITER_B, AppendFault, Harness, next_page, read_proven

# Appending and reading without faults.


async def test_records_are_read_in_order_once_another_one_stands_on_them(harness: Harness) -> None:
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    chain = await harness.lead(log, genesis)
    made = []
    for number in range(20):
        made += chain.group(b"body %d" % number, 3)
    for record in made:
        await log.append(record)
    found = await read_proven(other.read(ORIGIN), made[-2].position)
    assert [each.number for each in found] == list(range(1, 22))
    assert found[2:] == made[:-1]
    assert other.proven == made[-2].position
    assert log.proven == made[-1].position


async def test_the_newest_record_is_in_the_tail_until_another_one_stands_on_it(
    harness: Harness,
) -> None:
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    chain = await harness.lead(log, genesis)
    group = chain.group(b"body", 3)[0]
    await log.append(group)
    reader = other.read(ORIGIN)
    page = await reader.next_page()
    assert page.tail == [group]
    assert [each.number for each in page.records] == [1, 2]
    page = await reader.next_page()
    assert page.records == [] and page.tail == [group]
    await log.append(chain.heartbeat(4))
    page = await reader.next_page()
    assert page.records == [group]


async def test_a_takeover_proves_nothing_about_what_it_stands_on(harness: Harness) -> None:
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    await harness.lead(log, genesis)
    page = await other.read(ORIGIN).next_page()
    assert page.records == []
    assert [each.number for each in page.tail] == [1, 2]


async def test_ones_own_takeover_proves_all_before_it(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    reader = log.read(ORIGIN)
    await harness.lead(log, genesis)
    page = await reader.next_page()
    assert [each.number for each in page.records] == [1, 2]
    assert page.tail == []


async def test_large_groups_are_several_records(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = RecordChain(
        harness.log_id, WRITER_B, position=genesis.position, record_bytes=LEAST_RECORD_BYTES
    )
    await log.append(chain.takeover(Takeover("b"), 2))
    body = bytes(range(256)) * 64
    parts = chain.group(body, 3)
    assert len(parts) > 3
    for record in parts:
        await log.append(record)
    assembler, bodies = GroupAssembler(), []
    for record in await read_proven(log.read(ORIGIN), parts[-1].position):
        bodies.append(assembler.add(record))
    assert bodies[-1] == body and set(bodies[:-1]) == {None}


async def test_a_reader_continues_after_what_was_applied(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    made = [chain.heartbeat(number) for number in range(5)]
    for record in made:
        await log.append(record)
    assert (await log.read(made[1].position).next_page()).records == made[2:]


async def test_a_reader_that_begins_after_the_newest_record_knows_its_time(
    harness: Harness,
) -> None:
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    chain = await harness.lead(log, genesis)
    for time_us in (70, 80):
        await log.append(chain.heartbeat(time_us))
    reader = other.read(chain.position)
    page = await next_page(reader)
    assert (page.records, page.tail, page.newest, page.time_us) == ([], [], chain.position, 80)
    await log.append(chain.heartbeat(90))
    assert (await next_page(reader)).time_us == 90


# Two writers.


async def test_the_second_of_two_records_at_a_number_is_refused(harness: Harness) -> None:
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    chain = await harness.lead(log, genesis)
    with pytest.raises(LogConflict, match="another writer's record is at number 2"):
        await harness.lead(other, genesis, WRITER_B)
    await log.append(chain.heartbeat(3))


async def test_a_leader_that_was_replaced_appends_nothing(harness: Harness) -> None:
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    chain = await harness.lead(log, genesis)
    newest = chain.heartbeat(3)
    await log.append(newest)
    await harness.lead(other, newest, WRITER_B)
    with pytest.raises(LogConflict):
        await log.append(chain.group(b"late", 4)[0])
    assert len(await harness.stored()) == 4


async def test_of_many_takeovers_at_once_one_succeeds(harness: Harness) -> None:
    genesis = await harness.create()
    logs = [await harness.open() for _ in range(4)]
    outcomes = await asyncio.gather(
        *(harness.lead(log, genesis, bytes([index]) * 16) for index, log in enumerate(logs, 1)),
        return_exceptions=True,
    )
    assert sum(isinstance(each, RecordChain) for each in outcomes) == 1
    assert sum(isinstance(each, LogConflict) for each in outcomes) == 3
    assert len(await harness.stored()) == 2


# Attempts whose outcome is not known.


@pytest.mark.parametrize("fault", AppendFault)
async def test_a_record_whose_attempt_was_not_answered_is_there_once(
    harness: Harness, fault: AppendFault
) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    await harness.break_next(log, fault)
    first, second = chain.group(b"first", 3)[0], chain.group(b"second", 4)[0]
    await log.append(first)
    await log.append(second)
    await harness.deliver_late()
    stored = [decode_record(data) for data in await harness.stored()]
    assert stored[2:] == [first, second]


async def test_a_record_that_landed_unanswered_and_was_built_upon_is_a_conflict(
    harness: Harness,
) -> None:
    """It is in the log, but another writer leads: nothing more may be acknowledged."""
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    chain = await harness.lead(log, genesis)
    record = chain.group(b"body", 3)[0]
    await harness.hold_copies(True)
    append = asyncio.create_task(log.append(record))
    await harness.end_wait(record.position)
    takeover = asyncio.create_task(harness.lead(other, record, WRITER_B))
    await harness.hold_copies(False)
    outcomes = await asyncio.gather(append, takeover, return_exceptions=True)
    # Either of them may have been first after the copies continued.
    if outcomes[0] is not None:
        assert isinstance(outcomes[0], LogConflict)
    assert isinstance(outcomes[1], RecordChain)
    assert decode_record((await harness.stored())[2]) == record


async def test_a_record_that_is_found_counts_when_a_later_write_is_confirmed(
    harness: Harness,
) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    record = chain.group(b"body", 3)[0]
    await harness.hold_copies(True)
    append = asyncio.create_task(log.append(record))
    await harness.end_wait(record.position)
    for _ in range(20):
        await asyncio.sleep(0)
    # It can be read, and is offered again; but nothing has confirmed it.
    assert not append.done()
    await harness.hold_copies(False)
    await append
    assert log.proven == record.position
    await harness.failover()
    await log.append(chain.heartbeat(4))
    assert decode_record((await harness.stored())[2]) == record


async def test_what_was_seen_and_lost_in_a_failover_is_not_applied(harness: Harness) -> None:
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    chain = await harness.lead(log, genesis)
    await log.append(chain.heartbeat(3))
    lost = chain.group(b"lost", 4)[0]
    reader = other.read(ORIGIN)
    await harness.hold_copies(True)
    append = asyncio.create_task(log.append(lost))
    await harness.end_wait(lost.position)
    while (await reader.next_page()).tail != [lost]:
        pass
    append.cancel()
    await asyncio.wait([append])
    await harness.failover()
    await harness.hold_copies(False)
    # A takeover on top of what is gone is refused, and the reader finds what there is instead.
    with pytest.raises(LogConflict, match="never confirmed, is gone"):
        await harness.lead(other, lost, WRITER_B)
    page = await next_page(reader)
    while lost in page.tail:
        page = await next_page(reader)
    taken_over = RecordChain(harness.log_id, WRITER_B, position=page.newest)
    await other.append(taken_over.takeover(Takeover("b"), 5))
    found = await read_proven(reader, taken_over.position)
    assert lost not in found
    assert [each.number for each in found] == [4]
    assert found[-1].position == taken_over.position


async def test_two_that_were_seen_and_lost_are_not_applied(harness: Harness) -> None:
    """A takeover stands on a record, and neither has copies: the one proves nothing about the
    other."""
    genesis = await harness.create()
    log, other, third = [await harness.open() for _ in range(3)]
    chain = await harness.lead(log, genesis)
    await log.append(chain.heartbeat(3))
    lost = chain.group(b"lost", 4)[0]
    reader = third.read(ORIGIN)
    await harness.hold_copies(True)
    append = asyncio.create_task(log.append(lost))
    await harness.end_wait(lost.position)
    append.cancel()
    await asyncio.wait([append])
    candidate = RecordChain(harness.log_id, WRITER_B, position=lost.position)
    takeover = candidate.takeover(Takeover("b"), 5)
    append = asyncio.create_task(other.append(takeover))
    await harness.end_wait(takeover.position)
    page, applied = await reader.next_page(), []
    while page.tail[-1:] != [takeover]:
        applied += page.records
        page = await reader.next_page()
    applied += page.records
    append.cancel()
    await asyncio.wait([append])
    assert lost not in applied
    await harness.failover()
    await harness.hold_copies(False)
    assert len(await harness.stored()) == 3


async def test_after_a_cancelled_append_only_the_same_or_a_takeover_is_taken(
    harness: Harness,
) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    record = chain.group(b"body", 3)[0]
    await harness.hold_copies(True)
    append = asyncio.create_task(log.append(record))
    await harness.end_wait(record.position)
    append.cancel()
    await asyncio.wait([append])
    with pytest.raises(RuntimeError, match="what became of record 3 is not known"):
        await log.append(chain.heartbeat(4))
    await harness.hold_copies(False)
    await log.append(record)
    again = RecordChain(harness.log_id, WRITER_B, position=record.position)
    await log.append(again.takeover(Takeover("a"), 5))


async def test_while_the_settings_do_not_hold_nothing_is_acknowledged(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    await harness.set_safe(False)
    append = asyncio.create_task(log.append(chain.group(b"body", 3)[0]))
    while not log.trouble:
        await asyncio.sleep(0)
    assert not append.done()
    assert (await log.state()).unsafe
    await harness.set_safe(True)
    await append
    assert log.trouble == ""


async def test_an_append_outlasts_a_time_without_any_server(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    await harness.set_reachable(False)
    append = asyncio.create_task(log.append(chain.group(b"body", 3)[0]))
    while not log.trouble:
        await asyncio.sleep(0)
    reader = log.read(ORIGIN)
    with pytest.raises(LogUnavailable):
        await reader.next_page()
    await harness.set_reachable(True)
    await append
    page = await next_page(reader)
    assert [each.number for each in page.records] == [1, 2, 3]


# Logs that are not what they were.


async def test_a_log_that_lost_what_it_confirmed_is_damaged(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    for number in range(4):
        await log.append(chain.heartbeat(number))
    known = log.bookmark(chain.position)
    await harness.lose_suffix(2)
    with pytest.raises(LogDamaged, match="ends with record 4, and record 6 was confirmed"):
        await log.append(chain.heartbeat(9))
    again = harness.make_log()
    harness.opened.append(again)
    with pytest.raises(LogDamaged, match="ends with record 4, and this replica has applied"):
        await again.open(known)


async def test_another_history_is_damage_to_a_reader(harness: Harness) -> None:
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    chain = await harness.lead(log, genesis)
    for number in range(4):
        await log.append(chain.heartbeat(number))
    reader = other.read(ORIGIN)
    await read_proven(reader, RecordPosition(5, b""))
    await harness.lose_suffix(2)
    # A replica that knows of nothing goes on, as an operator may have decided.
    stored = [decode_record(data) for data in await harness.stored()]
    third = await harness.open()
    following = await harness.lead(third, stored[-1], WRITER_B)
    await third.append(following.heartbeat(1))
    await third.append(following.heartbeat(2))
    with pytest.raises(LogDamaged, match="record 5 of the log is not the one"):
        for _ in range(3):
            await reader.next_page()


async def test_a_log_that_was_made_anew_is_foreign(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    reader = log.read(ORIGIN)
    await reader.next_page()
    known = log.bookmark(chain.position)
    await harness.recreate(harness.genesis(b"M" * 16))
    with pytest.raises(LogForeign, match="made anew"):
        await log.append(chain.heartbeat(3))
    with pytest.raises(LogForeign, match="made anew"):
        await reader.next_page()
    again = harness.make_log()
    harness.opened.append(again)
    with pytest.raises(LogForeign, match="this data directory belongs to"):
        await again.open(known)


async def test_a_log_of_another_system_is_foreign(harness: Harness) -> None:
    genesis = await harness.create()
    log = harness.make_log()
    harness.opened.append(log)
    with pytest.raises(LogForeign, match="database system"):
        await log.open(LogBookmark(harness.log_id, genesis.position, "another-system", 1))


async def test_a_server_of_an_older_timeline_is_not_used(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    known = msgspec.structs.replace(log.bookmark(genesis.position), timeline=99)
    again = harness.make_log()
    harness.opened.append(again)
    with pytest.raises(LogUnavailable, match="99 was used before: it was replaced"):
        await again.open(known)


async def test_a_damaged_record_stops_its_readers(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    for number in range(4):
        await log.append(chain.heartbeat(number))
    await harness.damage(4)
    with pytest.raises(LogDamaged, match="checksum of record 4"):
        await log.read(ORIGIN).next_page()


async def test_a_missing_record_stops_its_readers(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    for number in range(4):
        await log.append(chain.heartbeat(number))
    await harness.drop(4)
    with pytest.raises(LogDamaged, match="record 4 of the log has the number 5"):
        await log.read(ORIGIN).next_page()


async def test_a_newer_format_stops_its_readers(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    newer = RecordChain(
        harness.log_id, WRITER_B, position=genesis.position, format_number=FORMAT + 1
    )
    await log.append(newer.takeover(Takeover("b"), 2))
    with pytest.raises(LogTooNew):
        await log.read(ORIGIN).next_page()
    with pytest.raises(LogTooNew):
        await harness.open()


# Opening and making.


async def test_there_is_no_log_before_it_is_made(harness: Harness) -> None:
    log = harness.make_log()
    harness.opened.append(log)
    with pytest.raises(LogForeign, match="there is no log"):
        await log.open()


async def test_a_log_is_not_made_twice(harness: Harness) -> None:
    genesis = await harness.create()
    with pytest.raises(LogForeign, match="already"):
        await harness.make(harness.genesis(b"M" * 16))
    assert await harness.stored() == [genesis.data]


async def test_a_log_whose_settings_do_not_hold_is_not_opened(harness: Harness) -> None:
    await harness.create()
    await harness.set_safe(False)
    log = harness.make_log()
    harness.opened.append(log)
    with pytest.raises(LogUnsafe):
        await log.open()


async def test_a_log_that_can_not_be_reached_is_not_opened(harness: Harness) -> None:
    await harness.create()
    await harness.set_reachable(False)
    log = harness.make_log()
    harness.opened.append(log)
    with pytest.raises(LogUnavailable):
        await log.open()


async def test_a_replica_opens_its_log_again(harness: Harness) -> None:
    genesis = await harness.create()
    log = await harness.open()
    chain = await harness.lead(log, genesis)
    known = log.bookmark(chain.position)
    again = harness.make_log()
    harness.opened.append(again)
    state = await again.open(known)
    assert state.head == chain.position == again.proven
    assert (state.log_id, state.first) == (harness.log_id, 1)
    assert again.bookmark(chain.position) == known


# Trimming and replicas.


async def test_an_append_succeeds_on_top_of_a_record_that_was_trimmed(harness: Harness) -> None:
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    chain = await harness.lead(log, genesis)
    for number in range(40):
        await log.append(chain.heartbeat(number))
    first = await log.trim(chain.position.number)
    assert 1 < first <= chain.position.number
    await log.append(chain.heartbeat(99))
    with pytest.raises(LogTrimmed, match=f"begins with record {first}"):
        await other.read(ORIGIN).next_page()
    # And a writer who knows only what was trimmed is refused.
    with pytest.raises(LogConflict):
        await harness.lead(other, genesis, WRITER_B)


async def test_what_is_not_proven_is_never_trimmed(harness: Harness) -> None:
    genesis = await harness.create()
    log, other = await harness.open(), await harness.open()
    chain = await harness.lead(log, genesis)
    for number in range(40):
        await log.append(chain.heartbeat(number))
    assert await other.trim(40) == 1


def state(name: str, writer: bytes = b"w" * 16, synced: int = 7) -> ReplicaState:
    return ReplicaState(name, "10.0.0.1:7381", "1.0", FORMAT, synced, writer, 123)


async def test_replicas_report_beside_the_log(harness: Harness) -> None:
    await harness.create()
    log = await harness.open()
    await log.report(state("b"))
    await log.report(state("a"))
    await log.report(state("b", synced=9))
    found = await log.replicas()
    assert [(each.name, each.synced, each.address) for each in found] == [
        ("a", 7, "10.0.0.1:7381"),
        ("b", 9, "10.0.0.1:7381"),
    ]
    assert all(0 <= each.age_s < 60 for each in found)
    assert await log.remove("a")
    assert not await log.remove("a")
    assert [each.name for each in await log.replicas()] == ["b"]


async def test_two_replicas_of_one_name_are_found(harness: Harness) -> None:
    await harness.create()
    log = await harness.open()
    await log.report(state("a"))
    with pytest.raises(LogNameTaken, match=r"10\.0\.0\.1:7381 reports as a"):
        await log.report(state("a", writer=b"x" * 16))
