"""Descriptions from columns are the same as those from the frames themselves."""

from __future__ import annotations

import base64
import json
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from crosswire.bond import hub_module, marshal
from crosswire.pipeline.decode import relink as relink_columns
from crosswire.pipeline.decode.meanings.contract import MOST_ASKED, Described
from crosswire.testing.traffic import SampleTraffic
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import Frame
from crosswire.wire.emp import frames as emp
from crosswire.wire.emqp import frames as emqp
from crosswire.wire.emqp.layout import ADMIN_COMMANDS, VERSION
from crosswire.wire.epoxy import comm
from crosswire.wire.epoxy import frames as epoxy
from crosswire.wire.micromsg2 import frames as micromsg2
from crosswire.wire.relink import frames as relink
from crosswire.wire.relink.handshake import (
    ConnectorHello,
    ConnectorVersion,
    ListenerHello,
    ListenerVersion,
    serialize_handshake,
)
from crosswire.wire.relink.layout import packet_layout
from crosswire.wire.zmtp import frames as zmtp
from crosswire.wire.zmtp.layout import FLAG_LONG, FLAG_MORE
from tests.pipeline.decode.described import (
    DescribedItem,
    Pieces,
    Talk,
    agrees,
    by_frames,
    check,
    check_together,
)
from tests.pipeline.decode.oracle import relink as relink_oracle
from tests.pipeline.decode.scanned import Noisy, noisy
from tests.wire.emqp.strategies import handshake
from tests.wire.stream import Stream
from tests.wire.vectors import load

every_protocol = pytest.mark.parametrize("name", PROTOCOL_NAMES)
steps = st.integers(1, 256)


# -------------------------------------------------------------------------------- all protocols


@st.composite
def exchanges(draw: st.DrawFn, name: str) -> Talk:
    """Two directions as a capture may have them, which know nothing of one another; of a protocol
    in which they must, only one has many frames."""
    roles = protocol(name).roles
    senders = (roles[0], roles[-1])
    streams = import_module(f"tests.wire.{name}.strategies").streams
    if agrees(name):
        if draw(st.booleans()):
            case = draw(noisy(streams(senders[0]), 3))
            chunks = [(True, piece) for piece in case.batches]
            return Talk(name, chunks, (case.stream, Stream(b"")), senders)
        case = draw(noisy(streams(senders[1]).filter(lambda stream: stream.peer), 3))
        opening = case.stream.peer
        chunks = [(True, opening), *((False, piece) for piece in case.batches)]
        return Talk(name, chunks, (Stream(opening), case.stream), senders)
    cases: list[Noisy] = [draw(noisy(streams(sender), 3)) for sender in senders]
    turns = draw(st.permutations([True] * 3 + [False] * 3))
    pieces = {True: list(cases[0].batches), False: list(cases[1].batches)}
    chunks = [(forward, pieces[forward].pop(0)) for forward in turns]
    return Talk(name, chunks, (cases[0].stream, cases[1].stream), senders)


@every_protocol
@settings(max_examples=40)
@given(data=st.data(), step=steps, payloads=st.booleans(), cut=st.integers(0, 40))
def test_streams(name: str, data: st.DataObject, step: int, payloads: bool, cut: int) -> None:
    check(data.draw(exchanges(name)), step_bytes=step, payloads=payloads, cut=cut)


@every_protocol
@settings(max_examples=15)
@given(data=st.data())
def test_frames_and_rows_can_alternate(name: str, data: st.DataObject) -> None:
    talk = data.draw(exchanges(name))
    count = len(by_frames(talk))
    by_frame = data.draw(st.frozensets(st.integers(0, max(count - 1, 0))))
    check(talk, by_frame=by_frame)


@every_protocol
@pytest.mark.parametrize("seed", range(3))
def test_conversations(name: str, seed: int) -> None:
    traffic = SampleTraffic(seed, messages=30, payload_bytes=300)
    pieces = [(forward, data) for _, forward, data in traffic.conversation(seed, name).chunks]
    description = check(Talk.of(name, pieces))
    assert any(isinstance(what, Described) and what.payload for *_, what in description)


def recorded(name: str) -> list[Talk]:
    """Each vector as a stream of its own, of either side."""
    roles = protocol(name).roles
    talks = []
    for vector in load(name):
        if "wire" in vector:
            wire = bytes.fromhex(vector["wire"])
        else:
            parts = [bytes.fromhex(part) for part in vector["frames"]]
            wire = handshake("DEALER") + zmtp.serialize_message(parts)
        for forward in (True, False):
            streams = (Stream(wire), Stream(b"")) if forward else (Stream(b""), Stream(wire))
            talks.append(Talk(name, [(forward, wire)], streams, (roles[0], roles[-1])))
    return talks


@every_protocol
def test_vectors(name: str) -> None:
    for talk in recorded(name):
        check(talk)


# ------------------------------------------------------------------------------------------- EMP

text = st.sampled_from(["", "a", 'a "x"', "back\\slash", "ünï", "\x01\n", "😀", '"data":{}', "}"])
numbers = st.sampled_from([0, -1, 1 << 62, 1 << 63, 10**40, 1.5])
values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
destinations = st.sampled_from(["queue/q", "topic/t", "service/s", "elsewhere", "topic/ü", 5])
carried = st.fixed_dictionaries(
    {"destination": destinations},
    optional={
        "json": values,
        "text": text | st.none(),
        "base64": st.sampled_from(["", base64.b64encode(b"\0\xff").decode(), "!", "ü", None]),
        "properties": st.dictionaries(text, values, max_size=2) | st.none() | st.just([]),
        "id": st.sampled_from([7, -(1 << 63), (1 << 63) - 1, 1 << 63, 10**30, None, "x"]),
        "more": values,
    },
)
operations = st.sampled_from(
    ["price", "$publish", "$deliver", "$subscribe", "$serve", "$authenticate", 'a"b\\', "ü\x02", ""]
)
objects: SearchStrategy[Any] = carried | st.dictionaries(text, values, max_size=2) | st.just({})


@st.composite
def written(draw: st.DrawFn, value: SearchStrategy[Any]) -> str:
    """JSON in one of the ways in which it is written."""
    spaced, escaped = draw(st.booleans()), draw(st.booleans())
    separators = (", ", ": ") if spaced else (",", ":")
    return json.dumps(draw(value), separators=separators, ensure_ascii=escaped)


@st.composite
def bodies(draw: st.DrawFn, members: dict[str, SearchStrategy[Any]]) -> bytes:
    """Members in any order, one of them twice, or missing, or not as it should be."""
    pairs = [(name, draw(written(value))) for name, value in members.items()]
    match draw(st.sampled_from(["whole"] * 5 + ["more", "twice", "missing", "wrong"])):
        case "more":
            pairs.append((draw(text), draw(written(values))))
        case "twice":
            name = draw(st.sampled_from(sorted(members)))
            pairs.append((name, draw(written(members[name]))))
        case "missing":
            pairs.pop(draw(st.integers(0, len(pairs) - 1)))
        case "wrong":
            pairs[draw(st.integers(0, len(pairs) - 1))] = draw(text), draw(text)
    if draw(st.booleans()):
        pairs = draw(st.permutations(pairs))
    comma, colon, end = draw(
        st.sampled_from([(",", ":", "}"), (", ", ": ", "}"), (" ,", " :", " }\n")])
    )
    body = "{" + comma.join(f"{json.dumps(name)}{colon}{value}" for name, value in pairs) + end
    raw = body.encode(errors="surrogatepass")
    index = draw(st.integers(0, len(raw) - 1))
    match draw(st.sampled_from(["whole"] * 6 + ["cut", "changed"])):
        case "cut":
            return raw[:index]
        case "changed":
            return raw[:index] + draw(st.binary(min_size=1, max_size=1)) + raw[index + 1 :]
    return raw


calls = bodies({"op": operations, "data": objects})
published = st.sampled_from([{"id": 5}, {"id": 1 << 63}, {"id": "x"}, {}])
results = bodies({"status": st.sampled_from(["success", "failure"]), "data": published | objects})
failures = bodies(
    {
        "status": st.just("failure"),
        "code": text | st.none(),
        "description": text | st.none(),
        "data": objects,
    }
)
few = st.integers(0, 2) | st.just((1 << 64) - 1)
emp_frames = st.one_of(
    st.builds(emp.Request, few, calls),
    st.builds(emp.Response, few, results | failures),
    st.builds(emp.Error, st.integers(0, 255), text),
    st.sampled_from([emp.Hello(1), emp.Ping(), emp.Pong(), emp.Bye()]),
)


@settings(max_examples=300)
@given(
    sent=st.lists(st.tuples(st.booleans(), emp_frames), max_size=8),
    payloads=st.booleans(),
)
def test_emp_content(sent: list[tuple[bool, Any]], payloads: bool) -> None:
    pieces = [(forward, emp.serialize(frame)) for forward, frame in sent]
    check(Talk.of("emp", pieces), payloads=payloads)


emp_pieces = st.tuples(st.booleans(), emp_frames.map(emp.serialize))


@settings(max_examples=60)
@given(talks=st.lists(st.lists(emp_pieces, max_size=6), min_size=1, max_size=4), data=st.data())
def test_emp_connections_together(talks: list[Pieces], data: st.DataObject) -> None:
    cuts = [data.draw(st.integers(0, len(pieces))) for pieces in talks]
    stays = [data.draw(st.booleans()) for _ in talks]
    check_together([Talk.of("emp", pieces) for pieces in talks], cuts, stays)


def described_of(name: str, *pieces: tuple[bool, bytes]) -> list[Any]:
    return [what for *_, what in check(Talk.of(name, list(pieces)))]


def emp_described(*bodies: bytes) -> list[Any]:
    """Requests and responses by turns, about one identifier."""
    pieces = [
        (index % 2 == 0, emp.serialize((emp.Request, emp.Response)[index % 2](1, body)))
        for index, body in enumerate(bodies)
    ]
    return described_of("emp", *pieces)


@pytest.mark.parametrize(
    ("body", "size", "after"),
    [
        (b'{"op":"a","data":{"b":1}}', 7, 1),
        (b'{"op": "a", "data": {"b": 1}}', 8, 1),
        (b'{"data":{"b":1},"op":"a"}', 7, 10),
        (b'{"op":"a","data":{"b":1},"x":{"b":1}}', 7, 13),
        (b'{"x":{"b":1},"op":"a","data":{"b":1}}', 7, 1),
        (b'{"op":"a","x":{"data":{"b":1}},"data":{"b":1} }', 7, 2),
        (b'{"op":"a","x":{"data":{"b":1}},"data":{"":0}}', 6, 1),
        (b'{"op":"a","\\u0064ata":{"b":1}}', 7, 1),
        (b'{"op":"a","data":{},"data":{"b":1}}', 7, 1),
        (b'{"op":"a"}', 0, 0),
        (b'{"op":"a","x":{}}', 0, 0),
        (b'{"op":"{}"}', 0, 0),
        (b'{"op":"a","x":"' + b"x" * 300 + b'","data":{"b":1}}', 7, 1),
    ],
)
def test_emp_finds_the_data_in_a_body(body: bytes, size: int, after: int) -> None:
    (description,) = emp_described(body)
    assert (description.payload_size, description.payload_end) == (size, after)
    assert description.destination == ("service/{}" if b"{}" in body[:9] else "service/a")


@pytest.mark.parametrize(
    ("request_body", "response_body", "payload", "content_type"),
    [
        (b'{"op":"a"}', b'{"status":"success"}', None, None),
        (b'{"op":"a","x":{}}', b'{"x":{},"status":"success"}', None, None),
        (b'{"op":"$publish"}', b'{"status":"failure","description":"d"}', None, None),
        (b'{"op":"a","data":{}}', b'{"status":"success","data":{}}', b"{}", "application/json"),
        (b'{"data":{},"op":"a"}', b'{"data":{},"status":"success"}', b"{}", "application/json"),
        (
            b'{"op":"a","\\u0064ata":{}}',
            b'{"\\u0064ata":{},"status":"success"}',
            b"{}",
            "application/json",
        ),
    ],
)
def test_emp_data_that_is_not_written_is_not_shown(
    request_body: bytes, response_body: bytes, payload: bytes | None, content_type: str | None
) -> None:
    description = emp_described(request_body, response_body)
    assert [(each.payload, each.content_type) for each in description] == [
        (payload, content_type)
    ] * 2


def test_emp_takes_the_last_of_two_operations() -> None:
    (description,) = emp_described(b'{"op":"a","data":{},"op":"b"}')
    assert description.fields == '{"id":1,"op":"b"}'


def test_emp_data_that_is_not_utf_8() -> None:
    (description,) = emp_described(b'{"op":"a","data":{"b":"\xff"}}')
    assert description == ("malformed", "application data is not UTF-8: invalid start byte")


def test_emp_data_that_is_nested_too_deep() -> None:
    (description,) = emp_described(b'{"op":"a","data":{"b":' + b"[" * 5000 + b"]" * 5000 + b"}}")
    assert description == ("malformed", "application data is not as it should be: nested too deep")


def test_emp_keeps_a_token_to_itself() -> None:
    (description,) = emp_described(b'{"op":"$authenticate","data":{"token":"secret"}}')
    assert description.payload is None and "secret" not in repr(description)


def test_emp_only_a_delivery_has_the_hubs_id() -> None:
    data = b'{"op":"%s","data":{"destination":"queue/q","text":"t","id":9}}'
    published, answer, delivered, _ = emp_described(
        data % b"$publish",
        b'{"status":"success","data":{"id":5}}',
        data % b"$deliver",
        b'{"status":"success","data":{}}',
    )
    assert (published.message_id, answer.message_id, delivered.message_id) == (None, 5, 9)
    assert published.payload == delivered.payload == b"t"
    assert answer.kind == "acknowledgement" and answer.destination == "queue/q"


@pytest.mark.parametrize(
    ("members", "payload", "content_type"),
    [
        (b'"text":"a\\u00fc\\n"', "aü\n".encode(), "text/plain"),
        (b'"text":"t","base64":"QQ=="', b"t", "text/plain"),
        (b'"text":null,"json":null,"base64":"QQ=="', b"null", "application/json"),
        (b'"text":"t","json":[ 1 ]', b"[ 1 ]", "application/json"),
        (b'"base64":"QUI="', b"AB", "application/octet-stream"),
        (b'"base64":"Q\\u0055I="', b"AB", "application/octet-stream"),
        (b'"base64":"QU=="', b"A", "application/octet-stream"),
        (b'"base64":"no"', b"", "application/octet-stream"),
        (b'"base64":null', b"", "application/octet-stream"),
        (b'"x":1', b"", "application/octet-stream"),
    ],
)
def test_emp_what_a_publication_carries(members: bytes, payload: bytes, content_type: str) -> None:
    data = b'{"destination":"topic/\\u00fc",%b,"properties":{"a" : 1.50}}' % members
    (description,) = emp_described(emp.serialize_call("$publish", data))
    assert (description.kind, description.destination) == ("publish", "topic/ü")
    assert (description.payload, description.content_type) == (payload, content_type)
    assert description.properties == '{"a":1.5}'


def test_emp_what_is_no_publication_is_a_request_like_any_other() -> None:
    data = b'{"destination":"queue/q","text":5}'
    description, answer = emp_described(
        emp.serialize_call("$publish", data), emp.serialize_success()
    )
    assert (description.kind, description.destination) == ("request", "service/$publish")
    assert (description.payload, description.content_type) == (data, "application/json")
    assert (answer.kind, answer.destination) == ("response", "service/$publish")


def test_emp_a_malformed_response_answers_nothing() -> None:
    call = emp.serialize_call("price")
    _, wrong, again, right = emp_described(
        call, b'{"status":"success"', b"{}", b'{"status":"success"}'
    )
    assert wrong[0] == again[0] == "malformed"
    assert (right.kind, right.destination, right.payload) == ("response", "service/price", None)


def test_emp_the_latest_requests_are_remembered() -> None:
    count = MOST_ASKED + 5
    call, success = emp.serialize_call("price"), emp.serialize_success()
    pieces = [(True, emp.serialize(emp.Request(each, call))) for each in range(count)]
    pieces += [(False, emp.serialize(emp.Response(each, success))) for each in (4, 5, count - 1)]
    indexes = [each.destination for each in described_of("emp", *pieces)[count:]]
    assert indexes == [None, "service/price", "service/price"]


# ------------------------------------------------------------------------------------------ eMQP

msgids = st.sampled_from(["1", "2", 'ü"\\', "x" * 300, "\ufffd", ""])
queues = st.sampled_from(["jobs", 'ü"', "x" * 300, ""])
headers = st.sampled_from(
    [
        "",
        "reply-requested",
        "reply-requested:false,guarantee",
        "a:1,b:x%20y,ü",
        '{"reply-requested": true, "a": 5}',
        '"quoted"\\',
        "a:" + "x" * 300,
    ]
)
outcomes = st.sampled_from(
    [
        b"",
        b"1",
        b'{"value": 1}',
        b'{"error": "no"}',
        b' {"error": null}',
        b'{"error": 5}',
        b'{"value": "TimeoutError"}',
        b'{"value": "\\u0054imeoutError"}',
        b'{"\\u0065rror": "no"}',
        b'{"error": "no"',
        b'{"value": "\xff", "error": "x"}',
        b'{"value":' + b"[" * 3000 + b',"error"',
        "ü".encode(),
        b"x" * 300,
        b"\xff",
        b"\xe2\x82",
    ]
)
timed = st.tuples(text, outcomes, text) | st.tuples(st.none(), outcomes, st.none())
emqp_frames = st.one_of(
    st.builds(emqp.Request, msgids, queues, headers, outcomes),
    st.builds(emqp.Reply, msgids, outcomes | msgids.map(str.encode), st.none() | msgids),
    st.builds(emqp.Publish, msgids, queues, st.none() | headers, outcomes),
    st.builds(lambda a, b, c, d: emqp.ScheduleFrame(a, b, c, *d), msgids, queues, headers, timed),
    st.builds(lambda a, b, c, d: emqp.UnscheduleFrame(a, b, c, *d), msgids, queues, headers, timed),
    st.builds(emqp.Ack, msgids, msgids),
    st.builds(emqp.Ready, msgids),
    st.builds(emqp.Heartbeat, msgids, text),
    st.builds(emqp.Inform, msgids, text, text),
    st.builds(emqp.Disconnect, msgids),
    st.builds(emqp.Kbai, msgids, st.sampled_from(["KBAI", "KBYE"])),
    st.builds(emqp.Admin, msgids, st.sampled_from(ADMIN_COMMANDS).map(bytes.decode)),
)
more_parts = st.lists(st.sampled_from([b"", b"1", b"x" * 256]), max_size=2)


def with_long_heads(parts: list[bytes]) -> bytes:
    """As nobody has to write short parts, but may."""
    return b"".join(
        bytes((FLAG_LONG | (FLAG_MORE if index < len(parts) - 1 else 0),))
        + len(part).to_bytes(8)
        + part
        for index, part in enumerate(parts)
    )


writers = st.sampled_from([zmtp.serialize_message, zmtp.serialize_message, with_long_heads])
emqp_messages = st.builds(
    lambda frame, more, write: write([*emqp.serialize(frame), *more]),
    emqp_frames,
    st.just([]) | more_parts,
    writers,
)
others = st.sampled_from(
    [
        zmtp.serialize_command("PING", b"\0\0hi"),
        zmtp.serialize_command("SUBSCRIBE", b"topic"),
        zmtp.serialize_message([b"no command"]),
        zmtp.serialize_message([b"", VERSION, b"REQUEST", b"1"]),
        zmtp.serialize_message([b"", VERSION, b"REPLY", b"\xff", b"x"]),
    ]
)


emqp_pieces = st.builds(
    lambda forward, frame: (forward, zmtp.serialize_message(emqp.serialize(frame))),
    st.booleans(),
    emqp_frames,
)
emqp_opening = [(True, handshake("DEALER")), (False, handshake("ROUTER"))]


@settings(max_examples=200)
@given(
    sent=st.lists(st.tuples(st.booleans(), emqp_messages | others), max_size=8),
    payloads=st.booleans(),
)
def test_emqp_content(sent: Pieces, payloads: bool) -> None:
    check(Talk.of("emqp", [*emqp_opening, *sent]), payloads=payloads)


@settings(max_examples=60)
@given(
    talks=st.lists(st.lists(emqp_pieces, max_size=6), min_size=1, max_size=4),
    data=st.data(),
)
def test_emqp_connections_together(talks: list[Pieces], data: st.DataObject) -> None:
    """A message and the command in it are not torn apart."""
    cuts = [2 * data.draw(st.integers(0, len(sent) + 2)) for sent in talks]
    stays = [data.draw(st.booleans()) for _ in talks]
    check_together([Talk.of("emqp", [*emqp_opening, *sent]) for sent in talks], cuts, stays)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["Identity", "identity", 'X-\n"\x7f', "X"]),
            st.sampled_from([b"", b"\0\xff", b"x" * 300]),
        ),
        max_size=4,
    )
)
def test_emqp_metadata(properties: list[tuple[str, bytes]]) -> None:
    """Of which a name may come twice."""
    metadata = zmtp.serialize_metadata({"Socket-Type": b"DEALER"})
    metadata += b"".join(zmtp.serialize_metadata({name: value}) for name, value in properties)
    greeting, ready = described_of(
        "emqp",
        (True, zmtp.serialize(zmtp.Greeting("NULL"))),
        (True, zmtp.serialize_command("READY", metadata)),
    )
    description = {name: value.hex() for name, value in [("Socket-Type", b"DEALER"), *properties]}
    assert json.loads(ready.fields) == {"name": "READY", "properties": description}
    assert greeting.kind == ready.kind == "handshake"


@settings(max_examples=30)
@given(
    topics=st.lists(st.tuples(queues, outcomes), max_size=5),
    subscribed=st.lists(st.sampled_from([b"\1a", b"\0a", b""]), max_size=3),
)
def test_emqp_publications(topics: list[tuple[str, bytes]], subscribed: list[bytes]) -> None:
    pieces = [(True, handshake("SUB")), (False, handshake("PUB"))]
    pieces += [(True, zmtp.serialize_message([each])) for each in subscribed]
    pieces += [(False, zmtp.serialize_message([topic.encode(), body])) for topic, body in topics]
    check(Talk.of("emqp", pieces))


def emqp_described(*frames: tuple[bool, Frame]) -> list[Any]:
    """Of commands alone."""
    pieces = [(forward, zmtp.serialize_message(emqp.serialize(frame))) for forward, frame in frames]
    return described_of("emqp", *emqp_opening, *pieces)[5::2]


def test_emqp_a_body_like_what_follows_it_is_not_mistaken_for_it() -> None:
    description = emqp_described((False, emqp.Reply("9", b"5", "5")))[0]
    assert (description.payload_size, description.payload_end) == (1, 3)


def test_emqp_a_result_that_is_no_text_is_a_result() -> None:
    (description,) = emqp_described((False, emqp.Reply("9", b'{"error":"\xff"}', "1")))
    assert (description.kind, description.status) == ("response", "success")


def test_emqp_a_receipt_that_is_no_text_is_read_as_one() -> None:
    _, receipt, other = emqp_described(
        (True, emqp.Request("a\ufffd", "jobs", "", b"job")),
        (False, emqp.Reply("2", b"a\xff")),
        (False, emqp.Reply("3", b"a\xff\xff")),
    )
    assert (receipt.kind, receipt.identifier) == ("acknowledgement", "a\ufffd")
    assert (other.kind, other.identifier, other.payload) == ("control", "3", b"a\xff\xff")


def test_emqp_the_latest_requests_are_remembered() -> None:
    count = MOST_ASKED + 5
    asked = [(True, emqp.Request(str(each), "jobs", "", b"")) for each in range(count)]
    receipts = [(False, emqp.Reply("r", str(each).encode())) for each in (4, 5, count - 1)]
    kinds = [each.kind for each in emqp_described(*asked, *receipts)[count:]]
    assert kinds == ["control", "acknowledgement", "acknowledgement"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"value":"x","error":"no"}', "failure"),
        (b'\r\n{"value":"TimeoutError"}', "timeout"),
        (b'{"\\u0065rror":"no"}', "failure"),
        (b'{"err\\u006Fr":"no"}', "failure"),
        (b'{"value":"Timeout\\u0045rror"}', "timeout"),
        (b'{"value":"\\n","more":"\\\\"}', "success"),
        (b'{"value":"errors","error":null}', "success"),
        (b'["TimeoutError"]', "success"),
        (b'"TimeoutError"', "success"),
        (b"{", "success"),
    ],
)
def test_emqp_what_became_of_a_job(body: bytes, status: str) -> None:
    (description,) = emqp_described((False, emqp.Reply("9", body, "1")))
    assert description.status == status


def test_emqp_a_request_its_receipt_and_its_result() -> None:
    asked, receipt, result = emqp_described(
        (True, emqp.Request("1", "jobs", "reply-requested,tries:3", b"job")),
        (False, emqp.Reply("2", b"1")),
        (False, emqp.Reply("3", b'{"error":"no"}', "1")),
    )
    assert (asked.kind, asked.properties) == ("request", '{"tries":3}')
    assert (receipt.kind, receipt.identifier) == ("acknowledgement", "1")
    assert (result.kind, result.status, result.identifier) == ("response", "failure", "1")
    assert asked.destination == receipt.destination == result.destination == "queue/jobs"


# ---------------------------------------------------------------------------------------- Relink

channels = st.sampled_from([(0,), (1,), (1,), (2,), (200,)])
many_channels = st.sampled_from([(), (1,), (1, 2), (2, 2, 0), tuple(range(20))])
targets = st.tuples(channels, st.just(False)) | st.tuples(many_channels, st.just(True))
one_target = st.tuples(channels, st.just(False))
relink_parts = st.sampled_from(
    [
        (),
        (b"",),
        (b"x" * 300,),
        (b'{"a":1,"b":"\\u00fc"}', b"payload"),
        (b"{}", b""),
        (b"not properties", b"x" * 8),
        (b"\xff", b"x" * 70_000),
        (b"a", b"", b"three"),
        (b"8 bytes.",) * 4,
    ]
)


def relink_packets(to: SearchStrategy[Any]) -> SearchStrategy[Frame]:
    marks = st.sampled_from(["received", "consumed", "committed", "uncommitted"])
    decided = st.sampled_from(["commit", "rollback"])
    closed = st.just("close")
    numbered = st.integers(0, 3) | st.just((1 << 32) - 1)
    return st.one_of(
        st.builds(lambda to, parts: relink.Message(to[0], to[1], parts), to, relink_parts),
        st.builds(lambda to: relink.Message(to[0], False, (b"plain",)), one_target),
        st.builds(lambda to: relink.ChannelOperation("close", *to), to),
        st.builds(
            lambda what, to: relink.ChannelOperation(what, *to), decided | closed, one_target
        ),
        st.builds(
            lambda what, to: relink.ChannelAcknowledgement(what, *to), marks | st.just("closed"), to
        ),
        st.builds(
            lambda what, to, at: relink.SequenceOperation(what, to[0], at, to[1]),
            decided,
            to,
            numbered,
        ),
        st.builds(
            lambda what, to, at: relink.SequenceAcknowledgement(what, to[0], at, to[1]),
            marks,
            to,
            numbered,
        ),
        st.sampled_from(
            [relink.Nop(), relink.Ping(), relink.Pong(), relink.Resume(), relink.Shutdown()]
        ),
    )


def relink_opening(endpoint: str, asked: int = 0, given: int = 7, sizes: Any = (1, 1)) -> Pieces:
    """As hellos may follow one another; the listener's is about link `given`."""
    connector = ConnectorHello(
        endpoint=endpoint, connector_id_size=sizes[0], listener_id_size=sizes[1], link=asked
    )
    return [
        (True, serialize_handshake(ConnectorVersion(0))),
        (False, serialize_handshake(ListenerVersion(0))),
        (True, serialize_handshake(connector)),
        (False, serialize_handshake(ListenerHello((1 << 64) - 1, given))),
    ]


def relink_pieces(sent: list[tuple[bool, Frame]], sizes: Any = (1, 1)) -> Pieces:
    layouts = packet_layout("listener", *sizes), packet_layout("connector", *sizes)
    return [
        (forward, b"".join(relink.serialize(packet, layouts[forward]))) for forward, packet in sent
    ]


@st.composite
def relink_talks(draw: st.DrawFn) -> Talk:
    """Most have nothing to do with many channels."""
    sizes = draw(st.sampled_from([(1, 1), (1, 2), (8, 3)]))
    endpoint = draw(
        st.sampled_from(["queue/q", "topic/t", "service/s", "service/s?x&serve", "", 'ü"?a'])
    )
    opening = relink_opening(
        endpoint, draw(st.sampled_from([0, 0, 7])), draw(st.sampled_from([7, 7, 0])), sizes
    )
    if not draw(st.integers(0, 5)):
        # The listener sends its hello before it has received the connector's.
        opening = [opening[index] for index in (1, 3, 0, 2)]
    to = draw(st.sampled_from([one_target, one_target, targets]))
    sent = draw(st.lists(st.tuples(st.booleans(), relink_packets(to)), max_size=12))
    return Talk.of("relink", [*opening, *relink_pieces(sent, sizes)])


@settings(max_examples=100)
@given(talk=relink_talks(), payloads=st.booleans(), by_frame=st.frozensets(st.integers(0, 15)))
def test_relink_content(talk: Talk, payloads: bool, by_frame: frozenset[int]) -> None:
    check(talk, payloads=payloads, by_frame=by_frame)


@settings(max_examples=40)
@given(talks=st.lists(relink_talks(), min_size=1, max_size=5), data=st.data())
def test_relink_connections_together(talks: list[Talk], data: st.DataObject) -> None:
    cuts = [data.draw(st.integers(0, len(by_frames(talk)))) for talk in talks]
    check_together(talks, cuts, [data.draw(st.booleans()) for _ in talks])


def relink_described(*sent: tuple[bool, Frame], **opening: int) -> list[Any]:
    """Of packets alone, where a connector asks a service."""
    return described_of(
        "relink", *relink_opening("service/s", **opening), *relink_pieces(list(sent))
    )[4:]


def test_relink_numbers_begin_again_where_the_sender_closes_a_channel() -> None:
    message = relink.Message((3,), False, (b"x",))
    description = relink_described(
        (True, message),
        (True, message),
        (False, relink.ChannelOperation("close", (3,))),
        (True, message),
        (True, relink.ChannelOperation("close", (3,))),
        (True, message),
        (False, message),
    )
    numbers = [(each.identifier, each.sequence) for each in description if each.payload]
    assert numbers == [("3:0", 0), ("3:1", 1), ("3:2", 2), ("3:0", 0), ("3:0", 0)]
    assert (description[0].kind, description[-1].kind) == ("request", "response")


def test_relink_a_link_that_was_resumed_has_no_numbers() -> None:
    (description,) = relink_described(
        (True, relink.Message((3,), False, (b"x",))), asked=7, given=7
    )
    assert (description.identifier, description.sequence, description.destination) == (
        "3:0",
        None,
        "service/s",
    )


def test_relink_of_too_many_channels_the_count_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (relink_columns, relink_oracle):
        monkeypatch.setattr(module, "MOST_CHANNELS", 50)
    many = [relink.Message((channel,), False, (b"x",)) for channel in range(51)]
    sent = [(forward, many[each]) for each in range(25) for forward in (True, False)]
    sent += [(True, many[each]) for each in (5, 50, 5)]
    *_, last, again, late, after = relink_described(*sent)
    assert (last.sequence, again.sequence) == (0, 1)
    assert (late.sequence, after.sequence, after.identifier) == (None, None, "5:0")


def test_relink_a_multicast_counts_on_every_channel() -> None:
    *_, description = relink_described(
        (True, relink.Message((1,), False, (b"x",))),
        (True, relink.Message((2, 1, 2), True, (b"x",))),
        (True, relink.Message((2,), False, (b"x",))),
    )
    assert (description.identifier, description.sequence) == ("2:2", 2)


def test_relink_of_very_many_targets_the_first_are_named_and_all_are_counted() -> None:
    (description,) = relink_described((True, relink.Message((1,) * 40_000, True, (b"x",))))
    fields = json.loads(description.fields)
    assert (len(fields["channels"]), fields["channels_count"]) == (1024, 40_000)


# ----------------------------------------------------------------------------------------- Epoxy


def bonded(name: str, **fields: Any) -> bytes:
    struct = hub_module().struct(f"crosswire.{name}")
    return marshal.marshal(struct.python_class(**fields), struct)


def value(**member: Any) -> Any:
    return hub_module().struct("crosswire.Value").python_class(**member)


properties = st.dictionaries(
    text,
    st.sampled_from([value(text='a"'), value(integer=-5), value(real=1.5), value(truth=False)]),
    max_size=2,
)
publications = st.builds(
    lambda destination, payload, content_type, properties: bonded(
        "Publication",
        destination=destination,
        payload=payload,
        content_type=content_type,
        properties=properties,
    ),
    destinations.filter(lambda each: isinstance(each, str)),
    st.binary(max_size=5),
    st.sampled_from(["", "text/plain"]),
    properties,
)
deliveries = st.builds(
    lambda number, destination, properties: bonded(
        "Delivery", id=number, destination=destination, payload=b"x", properties=properties
    ),
    st.sampled_from([-(1 << 63), 0, (1 << 63) - 1]),
    destinations.filter(lambda each: isinstance(each, str)),
    properties,
)
contents = st.one_of(
    publications,
    deliveries,
    st.sampled_from([b"CB\1\0\0", b"MF\1\0\0", b"CB\1", b"x", b"CB\2\0\xff", b"y" * 300]),
)
error_contents = st.sampled_from(
    [
        comm.marshal_error(comm.Error(comm.ErrorCode.METHOD_NOT_FOUND, "no")),
        comm.marshal_error(comm.Error(5, "our own")),
        b"no error",
    ]
)
layer_datas = st.sampled_from([None, None, comm.marshal_credentials("secret"), b"CB\1\0\0", b"z"])
methods = st.sampled_from(
    [
        ("crosswire.Hub", "Publish"),
        ("crosswire.Hub", "Subscribe"),
        ("crosswire.Hub", "Settle"),
        ("crosswire.Subscriber", "Deliver"),
        ("", ""),
        ("", "Method"),
        ("Service", ""),
        ('ü"\\', "x" * 300),
    ]
)


@st.composite
def epoxy_messages(draw: st.DrawFn) -> epoxy.Message:
    kind, (service, method) = draw(st.sampled_from(epoxy.MessageType)), draw(methods)
    number, layer_data = draw(few), draw(layer_datas)
    if draw(st.integers(0, 3)):
        content = draw(contents)
        return epoxy.Message(number, kind, service, method, layer_data, payload=content)
    return epoxy.Message(number, kind, service, method, layer_data, error=draw(error_contents))


epoxy_others = st.sampled_from(
    [epoxy.ConfigFrame(), epoxy.ProtocolError(3), epoxy.ProtocolError(99, comm.Error(1, "why"))]
)


@settings(max_examples=200)
@given(
    sent=st.lists(st.tuples(st.booleans(), epoxy_messages() | epoxy_others), max_size=8),
    payloads=st.booleans(),
)
def test_epoxy_content(sent: list[tuple[bool, Any]], payloads: bool) -> None:
    pieces = [(forward, epoxy.serialize(frame)) for forward, frame in sent]
    description: list[DescribedItem] = check(Talk.of("epoxy", pieces), payloads=payloads)
    texts = [what.fields for *_, what in description if isinstance(what, Described)]
    assert b"secret".hex() not in repr(texts)


def test_epoxy_a_publication_and_its_answer() -> None:
    asked = epoxy.Message(
        1,
        epoxy.MessageType.REQUEST,
        "crosswire.Hub",
        "Publish",
        payload=bonded("Publication", destination="topic/t", payload=b"hi"),
    )
    answered = epoxy.Message(1, epoxy.MessageType.RESPONSE, payload=b"CB\1\0\0")
    first, second = described_of(
        "epoxy", (True, epoxy.serialize(asked)), (False, epoxy.serialize(answered))
    )
    assert (first.kind, first.destination, first.payload) == ("publish", "topic/t", b"hi")
    assert (second.kind, second.destination, second.status) == (
        "acknowledgement",
        "topic/t",
        "success",
    )


# ------------------------------------------------------------------------------------- MicroMsg2

micromsg2_opening: Pieces = [
    (True, micromsg2.serialize(hello))
    for hello in (
        micromsg2.Handshake(1, 0, 0, "a", (), (micromsg2.Extension("ack"),)),
        micromsg2.Handshake(
            1, 0, 0, 'the "a"', (micromsg2.Extension("Batch-Ack"),), (micromsg2.Extension("x"),)
        ),
    )
] + [(False, micromsg2.serialize(micromsg2.Handshake(1, 0, 7, "b")))]
addresses = st.sampled_from(["reply/a", "reply/b", "jobs", "queue/q", "topic/t", "service/s", "ü"])
identifiers = st.sampled_from(
    ["N1", "T1", "1", "N-5", "N05", "D1.5", "D1.50", "D1e16", "Tü%C3%BC", "T"]
)
property_values = st.one_of(
    identifiers,
    addresses.map(lambda name: f"T{name}"),
    st.from_regex(r"[ND][+-]?[0-9]{0,20}\.?[0-9]{0,20}([eE][+-]?[0-9]{1,4})?", fullmatch=True),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda real: f"D{real!r}"),
    st.integers(-(10**6), 10**6).map(lambda number: f"D{number / 10**4!r}"),
    st.sampled_from(["", "T", "N", "D", "N-", "Dublin", "D-", "T+", "T:a:b", "x" * 300]),
    st.sampled_from(["T%", "T%2", "T%zz", "T%41%0a", "T%ff", "%22", "T%F0%9F%98%80", "T%C3ü"]),
    st.sampled_from(["N9223372036854775807", "N9223372036854775808", "D0.0", "D-0.0", "D00.5"]),
    st.sampled_from(["D0.00001", "D0.0001", 'T"\\\n\x01\x7f', "T😀"]),
)
property_names = st.sampled_from(
    ["correlation-id", "reply-to", "content-type", "error", "a", "A", "b_1", "", "ü", "a b"]
)
asked_properties = st.builds(
    lambda address, number: f"reply-to:T{address};correlation-id:N{number}", addresses, few
)
answer_properties = st.builds(
    lambda number, error: f"correlation-id:N{number}{error}",
    few,
    st.sampled_from(["", ";error:Tno", ";error:N5", ";"]),
)
any_properties = st.builds(
    lambda pairs, end: ";".join(f"{name}:{value}" for name, value in pairs) + end,
    st.lists(st.tuples(property_names, property_values), max_size=4),
    st.sampled_from(["", ";", ";", ";;", "\udcff", ";a"]),
)
encoded_properties = st.one_of(
    st.just(b""),
    *(
        each.map(lambda pieces: pieces.encode(errors="surrogateescape"))
        for each in (asked_properties, answer_properties, any_properties)
    ),
)
micromsg2_others = st.sampled_from(
    [
        micromsg2.ExtensionFrame(1, b"\1\2"),
        micromsg2.ExtensionFrame(1, b"\1"),
        micromsg2.ExtensionFrame(2, b"\1\2"),
        micromsg2.Command("subscribe", {"destination": "topic/ü"}),
        micromsg2.Command("Serve", {}),
        micromsg2.Error("no", {"why": 'a"b'}),
    ]
)


@st.composite
def micromsg2_talks(draw: st.DrawFn) -> Pieces:
    """Sequences as they should be; a direction may be in the middle of a message."""
    pieces = list(micromsg2_opening)
    sequence, within = {True: 1, False: 1}, {True: False, False: False}
    for forward in draw(st.lists(st.booleans(), max_size=10)):
        if draw(st.integers(0, 3)) == 0:
            pieces.append((forward, micromsg2.serialize(draw(micromsg2_others))))
            continue
        name, raw = ("", b"") if within[forward] else (draw(addresses), draw(encoded_properties))
        within[forward] = draw(st.integers(0, 3)) == 0
        content = draw(st.sampled_from([b"", b"x", b"y" * 300]))
        message = micromsg2.Message(sequence[forward], name, raw, content, within[forward])
        pieces.append((forward, micromsg2.serialize(message)))
        sequence[forward] += 1
    return pieces


@settings(max_examples=300)
@given(pieces=micromsg2_talks(), payloads=st.booleans(), by_frame=st.frozensets(st.integers(0, 12)))
def test_micromsg2_content(pieces: Pieces, payloads: bool, by_frame: frozenset[int]) -> None:
    check(Talk.of("micromsg2", pieces), payloads=payloads, by_frame=by_frame)


@settings(max_examples=60)
@given(data=st.data(), talks=st.lists(micromsg2_talks(), min_size=1, max_size=4))
def test_micromsg2_connections_together(data: st.DataObject, talks: list[Pieces]) -> None:
    cuts = [data.draw(st.integers(0, len(pieces))) for pieces in talks]
    stays = [data.draw(st.booleans()) for _ in talks]
    check_together([Talk.of("micromsg2", pieces) for pieces in talks], cuts, stays)


def micromsg2_described(*sent: tuple[bool, str, bytes]) -> list[Any]:
    """Of messages with these destinations and properties."""
    sequence = {True: 0, False: 0}
    pieces = list(micromsg2_opening)
    for forward, name, raw in sent:
        sequence[forward] += 1
        message = micromsg2.Message(sequence[forward], name, raw, b"")
        pieces.append((forward, micromsg2.serialize(message)))
    return described_of("micromsg2", *pieces)[len(micromsg2_opening) :]


def test_micromsg2_a_request_has_many_answers() -> None:
    asked, *answers = micromsg2_described(
        (True, "service/price", b"reply-to:Treply/me;correlation-id:N7;"),
        (False, "reply/me", b"correlation-id:N7;"),
        (False, "reply/me", b"correlation-id:T7;error:Tgone"),
        (False, "reply/me", b"correlation-id:N8"),
        (True, "reply/me", b"correlation-id:N7"),
    )
    assert (asked.kind, asked.identifier, asked.reply_to) == ("request", "7", "reply/me")
    assert [(each.kind, each.destination, each.status) for each in answers] == [
        ("response", "service/price", "success"),
        ("response", "service/price", "gone"),
        ("send", "reply/me", None),
        ("send", "reply/me", None),
    ]


def test_micromsg2_an_answer_that_wants_one_does_not_ask() -> None:
    *_, answer, other = micromsg2_described(
        (True, "service/s", b"reply-to:Treply/a"),
        (False, "reply/a", b"reply-to:Treply/b"),
        (True, "reply/b", b""),
    )
    assert (answer.kind, answer.reply_to, other.kind) == ("response", "reply/b", "send")


def test_micromsg2_the_latest_questions_are_remembered() -> None:
    count = MOST_ASKED + 5
    asked = [(True, "service/s", b"reply-to:Tr;correlation-id:N%d" % each) for each in range(count)]
    answered = [(False, "r", b"correlation-id:N%d" % each) for each in (4, 5, count - 1)]
    kinds = [each.kind for each in micromsg2_described(*asked, *answered)[count:]]
    assert kinds == ["send", "response", "response"]


@pytest.mark.parametrize(
    ("value", "in_json"),
    [
        ("N5", "5"),
        ("N05", "5"),
        ("N9223372036854775808", '"N9223372036854775808"'),
        ("D0.0001", "0.0001"),
        ("D1.50", "1.5"),
        ("D1e3", "1000.0"),
        ("D1.2.3", '"D1.2.3"'),
        ("Dublin", '"Dublin"'),
        ("T%22%0A", '"\\"\\n"'),
    ],
)
def test_micromsg2_values(value: str, in_json: str) -> None:
    (message,) = micromsg2_described((True, "q", f"a:{value}".encode()))
    assert message.properties == f'{{"a":{in_json}}}'


def test_micromsg2_texts_that_take_more_room_in_json() -> None:
    raw = b"correlation-id:T%s;reply-to:T%s;error:T%%00" % (b"\x01" * 300, b"\x02" * 300)
    description = micromsg2_described(*[(True, "q", raw)] * 3)
    assert {each.identifier for each in description} == {"\x01" * 300}
    assert {each.reply_to for each in description} == {"\x02" * 300}
    assert all(each.properties.endswith('"error":"\\u0000"}') for each in description)


def test_micromsg2_a_message_in_several_frames() -> None:
    message = micromsg2.Message
    chunks = [
        (True, message(1, "q", b"content-type:Ttext/plain", b"a", True)),
        (True, message(2, "", b"", b"b", True)),
        (False, message(1, "topic/t", b"", b"other")),
        (True, message(3, "", b"", b"c")),
    ]
    pieces = [(forward, micromsg2.serialize(frame)) for forward, frame in chunks]
    first, second, other, last = described_of("micromsg2", *micromsg2_opening, *pieces)[3:]
    assert [each.kind for each in (first, second, other, last)] == [None, None, "publish", "send"]
    assert first.destination == second.destination == last.destination == "queue/q"
    assert (last.payload, last.payload_size, last.content_type) == (b"abc", 1, "text/plain")
    assert last.begun_at == sum(len(data) for _, data in micromsg2_opening[:2])
