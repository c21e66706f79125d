"""Bytes of records and bodies: round trips, any damage is found, decoding is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.commitlog.body import RecordedBody, read_body, repeat_body
from crosswire.commitlog.records import (
    FORMAT,
    LEAST_RECORD_BYTES,
    ORIGIN,
    Genesis,
    GroupAssembler,
    HandOver,
    LogRecord,
    RecordChain,
    RecordKind,
    RecordPosition,
    Takeover,
    Trim,
    decode_record,
)
from crosswire.errors import LogDamaged, LogTooNew
from crosswire.store.memory import MemoryDisk

LOG, WRITER = b"l" * 16, b"w" * 16

keys = st.binary(max_size=20)
changes = st.lists(
    st.one_of(
        st.tuples(st.just(1), keys, st.binary(max_size=200)),
        st.tuples(st.just(2), keys, st.just(b"")),
        st.tuples(st.just(3), keys, keys),
    ),
    max_size=30,
)


def recorded(rows: list[tuple[int, bytes, bytes]]) -> RecordedBody:
    body = RecordedBody()
    for kind, first, second in rows:
        if kind == 1:
            body.put(first, second)
        elif kind == 2:
            body.delete(first)
        else:
            body.delete_range(first, second)
    return body


def chain(record_bytes: int = LEAST_RECORD_BYTES) -> RecordChain:
    made = RecordChain(
        LOG, WRITER, position=RecordPosition(41, b"p" * 32), record_bytes=record_bytes
    )
    made.takeover(Takeover("a"), 1)
    return made


@given(changes)
def test_a_body_is_read_as_it_was_recorded(rows: list[tuple[int, bytes, bytes]]) -> None:
    body = recorded(rows)
    encoded = body.encode()
    assert len(encoded) == body.size_bytes
    assert list(read_body(encoded)) == rows


@given(changes)
def test_a_body_is_repeated_in_order(rows: list[tuple[int, bytes, bytes]]) -> None:
    encoded = recorded(rows).encode()
    again = RecordedBody()
    repeat_body(encoded, again)
    assert again.encode() == encoded


@given(changes, st.data())
def test_a_body_that_is_cut_or_longer_is_refused(
    rows: list[tuple[int, bytes, bytes]], data: st.DataObject
) -> None:
    encoded = recorded(rows).encode()
    cut = data.draw(st.integers(0, len(encoded) - 1))
    for wrong in (encoded[:cut], encoded + b"x"):
        with pytest.raises(LogDamaged):
            read_body(wrong)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_refused_before_the_first_change(data: bytes) -> None:
    repeated = RecordedBody()
    try:
        repeat_body(data, repeated)
    except LogDamaged:
        assert repeated.size_bytes == 4
    else:
        assert repeated.encode() == data


def test_a_count_of_billions_costs_nothing() -> None:
    with pytest.raises(LogDamaged, match="4294967295 changes in 4 bytes"):
        read_body(b"\xff" * 4)


def test_a_body_applied_to_a_store_leaves_what_the_group_meant() -> None:
    rows = [(1, b"a", b"1"), (1, b"b", b"2"), (1, b"c", b"3"), (3, b"a", b"c"), (1, b"a", b"4")]
    rows += [(2, b"c", b"")]
    disk = MemoryDisk()
    disk.write(
        [
            (first, second if kind == 1 else None, second if kind == 3 else None)
            for kind, first, second in read_body(recorded(rows).encode())
        ]
    )
    assert disk.rows == {b"a": b"4"}


def records() -> list[LogRecord]:
    made = RecordChain(LOG, WRITER)
    return [
        made.genesis(Genesis("node", "ab" * 32, "lake"), 5),
        made.takeover(Takeover("a", "10.0.0.1:7381"), 6),
        *made.group(recorded([(1, b"key", b"value")]).encode(), 7),
        made.heartbeat(8),
        made.trim(Trim(2), 9),
        made.hand_over(HandOver("b"), 10),
    ]


def test_every_kind_is_decoded_as_it_was_made() -> None:
    before = ORIGIN
    for number, record in enumerate(records(), 1):
        assert decode_record(record.data, number=number) == record
        assert record.number == number
        assert record.predecessor == before.digest
        before = record.position
    kinds = [record.kind for record in records()]
    assert kinds == [
        RecordKind.GENESIS,
        RecordKind.TAKEOVER,
        RecordKind.GROUP,
        RecordKind.HEARTBEAT,
        RecordKind.TRIM,
        RecordKind.HAND_OVER,
    ]
    assert [record.term for record in records()] == [1, 2, 2, 2, 2, 2]
    genesis, takeover, _, _, trim, hand_over = records()
    assert genesis.read(Genesis) == Genesis("node", "ab" * 32, "lake")
    assert takeover.read(Takeover) == Takeover("a", "10.0.0.1:7381")
    assert trim.read(Trim) == Trim(2)
    assert hand_over.read(HandOver) == HandOver("b")
    with pytest.raises(LogDamaged, match="is not a Takeover"):
        trim.read(Takeover)


@given(st.integers(0, 5), st.data())
def test_a_changed_byte_is_found_wherever_it_is(index: int, data: st.DataObject) -> None:
    record = records()[index]
    at = data.draw(st.integers(0, len(record.data) - 1))
    mask = data.draw(st.integers(1, 255))
    wrong = bytearray(record.data)
    wrong[at] ^= mask
    with pytest.raises((LogDamaged, LogTooNew)):
        decode_record(bytes(wrong))


@given(st.integers(0, 5), st.data())
def test_a_record_that_is_cut_or_longer_is_refused(index: int, data: st.DataObject) -> None:
    record = records()[index]
    cut = data.draw(st.integers(0, len(record.data) - 1))
    for wrong in (record.data[:cut], record.data + b"\0"):
        with pytest.raises(LogDamaged):
            decode_record(wrong)


@given(st.binary(max_size=400))
def test_any_bytes_are_refused_with_an_error_of_the_log(data: bytes) -> None:
    with pytest.raises((LogDamaged, LogTooNew)):
        decode_record(data)


def test_a_record_at_another_number_is_refused() -> None:
    with pytest.raises(LogDamaged, match="record 7 of the log has the number 4"):
        decode_record(records()[3].data, number=7)


def test_a_newer_format_is_recognized_and_not_taken_for_damage() -> None:
    made = RecordChain(LOG, WRITER, format_number=FORMAT + 1)
    with pytest.raises(LogTooNew, match=r"record 1 .* format 2.* Install the version"):
        decode_record(made.genesis(Genesis("n"), 1).data)


def test_nobody_writes_without_a_takeover() -> None:
    with pytest.raises(ValueError, match="takeover"):
        RecordChain(LOG, WRITER, position=RecordPosition(3, b"p" * 32)).heartbeat(1)


# Groups of several records.


@given(st.binary(min_size=1, max_size=5 * LEAST_RECORD_BYTES))
def test_a_group_of_any_size_is_put_together_again(body: bytes) -> None:
    made = chain()
    parts = made.group(body, 9)
    assert all(len(each.data) <= LEAST_RECORD_BYTES for each in parts)
    assembler = GroupAssembler()
    bodies = [assembler.add(decode_record(each.data)) for each in parts]
    assert bodies[:-1] == [None] * (len(parts) - 1)
    assert bodies[-1] == body
    assert not assembler.is_open
    assert made.position == parts[-1].position


def test_parts_are_void_when_another_term_comes_first() -> None:
    made = chain()
    parts = made.group(b"x" * 3 * LEAST_RECORD_BYTES, 9)
    assembler = GroupAssembler()
    assert assembler.add(parts[0]) is None
    assert assembler.is_open
    other = RecordChain(LOG, b"v" * 16, position=parts[0].position)
    assert assembler.add(other.takeover(Takeover("b"), 10)) is None
    assert not assembler.is_open
    assert assembler.add(other.group(b"body", 11)[0]) == b"body"


def test_parts_in_the_wrong_order_are_damage() -> None:
    parts = chain().group(b"x" * 4 * LEAST_RECORD_BYTES, 9)
    with pytest.raises(LogDamaged, match="part 2 of 5, where part 1 was to be"):
        GroupAssembler().add(parts[1])
    assembler = GroupAssembler()
    assembler.add(parts[0])
    with pytest.raises(LogDamaged, match="part 3 of 5, where part 2 was to be"):
        assembler.add(parts[2])


def test_a_heartbeat_between_parts_is_damage() -> None:
    made = chain()
    assembler = GroupAssembler()
    assembler.add(made.group(b"x" * 2 * LEAST_RECORD_BYTES, 9)[0])
    with pytest.raises(LogDamaged, match="where part 2 was to be"):
        assembler.add(made.heartbeat(10))


def test_a_group_above_the_limit_is_refused_before_it_is_put_together() -> None:
    parts = chain().group(b"x" * 3 * LEAST_RECORD_BYTES, 9)
    assembler = GroupAssembler(limit_bytes=LEAST_RECORD_BYTES + 1)
    assembler.add(parts[0])
    with pytest.raises(LogDamaged, match="over 4097 bytes"):
        assembler.add(parts[1])
