"""Captures as connections and frames."""

from __future__ import annotations

import gzip
from collections import Counter, defaultdict
from pathlib import Path
from random import Random

import pytest

from crosswire.analyzer.analysis import AnalyzedFrame, CaptureAnalysis
from crosswire.errors import InvalidInput
from crosswire.testing.traffic import Conversation, SampleTraffic, packets, write_pcap
from crosswire.wire.registry import PROTOCOL_NAMES, protocol
from tests.pipeline.captures import ETHERNET, enhanced, interface, linked, section


def written(file: Path, *talks: Conversation) -> str:
    write_pcap(file, [each for talk in talks for each in packets(talk)])
    return str(file)


def analyzed(path: str) -> tuple[CaptureAnalysis, list[AnalyzedFrame]]:
    analysis = CaptureAnalysis()
    return analysis, list(analysis.frames(path))


def stream(talk: Conversation, is_forward: bool) -> bytes:
    return b"".join(data for _, forward, data in talk.chunks if forward is is_forward)


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_frames_are_those_of_the_decoder_with_their_bytes(name: str, tmp_path: Path) -> None:
    talk = SampleTraffic(messages=30, payload_bytes=3000).conversation(0, name)
    analysis, frames = analyzed(written(tmp_path / "one.pcap", talk))
    (connection,) = analysis.connections
    assert (connection.protocol, connection.end, connection.violations) == (name, "closed", 0)
    assert not connection.is_late and not connection.unread_bytes and not connection.missing_bytes
    roles = protocol(name).roles
    forward = protocol(name).decoder(roles[0])
    backward = protocol(name).decoder(roles[-1], peer=forward)
    for is_forward, decoder in ((True, forward), (False, backward)):
        sent = stream(talk, is_forward)
        own = [each for each in frames if each.is_forward is is_forward]
        rows = decoder.rows(sent)
        assert [(each.decoded.frame, each.decoded.offset) for each in own] == [
            (row.frame, row.offset) for row in rows
        ]
        for each in own:
            decoded = each.decoded
            assert decoded.data == sent[decoded.offset : decoded.offset + decoded.length]
            assert each.sender == decoder.sender and decoded.ranges
    assert connection.forward_bytes == len(stream(talk, True))
    assert [each.number for each in frames] == list(range(1, len(frames) + 1))
    assert [each.time_us for each in frames] == sorted(each.time_us for each in frames)


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_requests_and_answers_are_conversations(name: str, tmp_path: Path) -> None:
    sample = SampleTraffic(messages=40).conversation(0, name)
    _, frames = analyzed(written(tmp_path / "one.pcap", sample))
    asked: defaultdict[str, list[AnalyzedFrame]] = defaultdict(list)
    for each in frames:
        if each.subject.conversation:
            asked[each.subject.conversation].append(each)
    both = {True, False}
    answered = [talk for talk in asked.values() if {each.is_forward for each in talk} == both]
    assert len(answered) >= 15
    for own in answered:
        assert own[0].is_forward
        targets = {each.subject.destination for each in own}
        # The reply to a call of MicroMsg2 has a destination of its own.
        assert len(targets) == 1 or (name, targets) == ("micromsg2", {"service/price", "reply/me"})
    kinds = Counter(each.subject.destination.partition("/")[0] for each in frames)
    assert kinds["service"] + kinds["queue"] > 20


def test_pcapng_and_compressed_files(tmp_path: Path) -> None:
    talk = SampleTraffic(messages=5).conversation(0, "emp")
    plain = written(tmp_path / "plain.pcap", talk)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(Path(plain).read_bytes()))
    blocks = [section(), interface(ETHERNET)]
    for time_us, packet in packets(talk):
        blocks.append(enhanced(time_us, linked(packet[14:], ETHERNET)))
    (tmp_path / "new.pcapng").write_bytes(b"".join(blocks))
    names = ("plain.pcap", "packed.gz", "new.pcapng")
    found = [analyzed(str(tmp_path / name))[1] for name in names]
    assert found[0]
    for other in found[1:]:
        assert [each.decoded.fields for each in other if each.decoded.frame == "hello"]
        assert [each.decoded.offset for each in other] == [each.decoded.offset for each in found[0]]


def test_times_that_no_calendar_has(tmp_path: Path) -> None:
    talk = SampleTraffic(messages=1).conversation(0, "emp")
    blocks = [section(), interface(ETHERNET, offset=1 << 62)]
    for _, packet in packets(talk):
        blocks.append(enhanced((1 << 64) - 1, linked(packet[14:], ETHERNET)))
    (tmp_path / "late.pcapng").write_bytes(b"".join(blocks))
    _, frames = analyzed(str(tmp_path / "late.pcapng"))
    assert {each.time_us for each in frames} == {253_402_300_799_999_999}


def test_a_late_capture_with_a_gap(tmp_path: Path) -> None:
    talk = SampleTraffic(messages=60).conversation(0, "emp")
    records = list(packets(talk))
    file = tmp_path / "late.pcap"
    write_pcap(file, records[9:60] + records[64:])
    analysis, frames = analyzed(str(file))
    (connection,) = analysis.connections
    assert connection.is_late and connection.missing_bytes
    names = Counter(each.decoded.frame for each in frames)
    assert names["gap"] and names["unsynchronized"] and names["request"] > 20
    # What is no frame may have a secret in it.
    skipped = [each.decoded for each in frames if each.decoded.frame == "unsynchronized"]
    for each_skipped in skipped:
        assert set(each_skipped.data) <= {ord("*")} and each_skipped.fields["reason"]
    assert not any(each.decoded.violation for each in frames)


def test_a_connection_of_an_unknown_protocol(tmp_path: Path) -> None:
    chunks = (
        (1_000_000, True, b"GET / HTTP/1.1\r\n\r\n"),
        (2_000_000, False, b"HTTP/1.1 200 OK\r\n\r\n"),
    )
    talk = Conversation(0, "http", "http", 8080, chunks)
    analysis, frames = analyzed(written(tmp_path / "http.pcap", talk))
    (connection,) = analysis.connections
    assert frames == [] and connection.protocol == ""
    assert (connection.forward_bytes, connection.backward_bytes) == (18, 19)


def test_no_capture(tmp_path: Path) -> None:
    (tmp_path / "text.pcap").write_bytes(b"this is no capture, whatever its name says")
    with pytest.raises(InvalidInput, match="neither pcap nor pcapng"):
        analyzed(str(tmp_path / "text.pcap"))
    with pytest.raises(InvalidInput, match="no protocol 'x'"):
        CaptureAnalysis({7: "x"})


@pytest.mark.parametrize(
    ("name", "sender", "data", "clause"),
    [
        ("emp", "client", "000000080000000001000000ffffffff", "hub limit emp.frame_bytes"),
        ("emqp", "client", "00" * 12, "ZMTP RFC 37, Greeting"),
        ("relink", "connector", "00" * 8 + "016109010000000000" + "00" * 15, "Relink 1, Handshake"),
        ("epoxy", "client", "0000", "Epoxy, The frame"),
        ("epoxy", "client", "010043470100000005", "Epoxy, Framelet structures"),
        ("micromsg2", "client", "0100000163000361 2c620000", "MicroMsg2, Definitions"),
    ],
)
def test_violations_have_clauses(name: str, sender: str, data: str, clause: str) -> None:
    frames = list(CaptureAnalysis().raw_frames([bytes.fromhex(data)], name, sender))
    violation = frames[-1].decoded.violation
    assert violation is not None and violation.clause == clause and violation.reason
    assert frames[-1].connection.violations == 1


@pytest.mark.parametrize("name", PROTOCOL_NAMES)
def test_any_bytes_are_frames_and_violations_with_clauses(name: str) -> None:
    random = Random(name)
    roles = protocol(name).roles
    violations = 0
    for seed in range(40):
        talk = SampleTraffic(seed=seed % 4, messages=5, payload_bytes=30).conversation(0, name)
        is_forward = random.random() < 0.5
        data = bytearray(stream(talk, is_forward))
        for _ in range(random.randrange(1, 6)):
            data[random.randrange(len(data))] = random.choice([0, 1, 255, random.randrange(256)])
        sender = roles[0] if is_forward else roles[-1]
        late = random.random() < 0.3
        for each in CaptureAnalysis().raw_frames([bytes(data)], name, sender, late=late):
            decoded = each.decoded
            for found in decoded.ranges:
                assert 0 <= found.start <= found.end <= decoded.length
            if decoded.violation is not None:
                violations += 1
                assert decoded.violation.clause, decoded.violation
    # Nearly every byte of Relink's handshake and packets is a size, a payload or padding.
    assert violations > 3 or name == "relink"
