"""What is told of frames is the same from columns as from the frames themselves."""

from __future__ import annotations

import base64
import json
from importlib import import_module
from typing import Any

import pytest
from benchmarks.traffic import Traffic
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from crosswire.bond import hub_module, marshal
from crosswire.pipeline.protocols.contract import Described
from crosswire.wire import PROTOCOL_NAMES, protocol
from crosswire.wire.contract import Frame
from crosswire.wire.emp import frames as emp
from crosswire.wire.emqp import frames as emqp
from crosswire.wire.epoxy import comm
from crosswire.wire.epoxy import frames as epoxy
from crosswire.wire.zmtp import frames as zmtp
from tests.pipeline.described import Said, Talk, Told, agrees, by_frames, check
from tests.wire.columns import Noisy, noisy
from tests.wire.emqp.strategies import handshake
from tests.wire.stream import Stream
from tests.wire.vectors import load

every_protocol = pytest.mark.parametrize("name", PROTOCOL_NAMES)
steps = st.integers(1, 256)


# -------------------------------------------------------------------------------- all protocols


@st.composite
def exchanges(draw: st.DrawFn, name: str) -> Talk:
    """Two directions as a capture may have them, which know nothing of one another; of a protocol
    in which they must, only one says much."""
    roles = protocol(name).roles
    senders = (roles[0], roles[-1])
    streams = import_module(f"tests.wire.{name}.strategies").streams
    if agrees(name):
        if draw(st.booleans()):
            case = draw(noisy(streams(senders[0]), 3))
            said = [(True, piece) for piece in case.batches]
            return Talk(name, said, (case.stream, Stream(b"")), senders)
        case = draw(noisy(streams(senders[1]).filter(lambda stream: stream.peer), 3))
        opening = case.stream.peer
        said = [(True, opening), *((False, piece) for piece in case.batches)]
        return Talk(name, said, (Stream(opening), case.stream), senders)
    cases: list[Noisy] = [draw(noisy(streams(sender), 3)) for sender in senders]
    turns = draw(st.permutations([True] * 3 + [False] * 3))
    pieces = {True: list(cases[0].batches), False: list(cases[1].batches)}
    said = [(forward, pieces[forward].pop(0)) for forward in turns]
    return Talk(name, said, (cases[0].stream, cases[1].stream), senders)


@every_protocol
@settings(max_examples=40)
@given(data=st.data(), step=steps, payloads=st.booleans())
def test_streams(name: str, data: st.DataObject, step: int, payloads: bool) -> None:
    check(data.draw(exchanges(name)), step_bytes=step, payloads=payloads)


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
    traffic = Traffic(seed, messages=30, payload_bytes=300)
    said = [(forward, data) for _, forward, data in traffic.conversation(seed, name).said]
    told = check(Talk.of(name, said))
    assert any(isinstance(what, Described) and what.payload for *_, what in told)


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

text = st.sampled_from(["", "a", 'say "x"', "back\\slash", "ünï", "\x01\n", "😀", '"data":{}', "}"])
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
    place = draw(st.integers(0, len(raw) - 1))
    match draw(st.sampled_from(["whole"] * 6 + ["cut", "changed"])):
        case "cut":
            return raw[:place]
        case "changed":
            return raw[:place] + draw(st.binary(min_size=1, max_size=1)) + raw[place + 1 :]
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
    said = [(forward, emp.serialize(frame)) for forward, frame in sent]
    check(Talk.of("emp", said), payloads=payloads)


def told_of(name: str, *said: tuple[bool, bytes]) -> list[Any]:
    return [what for *_, what in check(Talk.of(name, list(said)))]


def emp_told(*bodies: bytes) -> list[Any]:
    """Requests and responses by turns, about one identifier."""
    said = [
        (index % 2 == 0, emp.serialize((emp.Request, emp.Response)[index % 2](1, body)))
        for index, body in enumerate(bodies)
    ]
    return told_of("emp", *said)


@pytest.mark.parametrize(
    ("body", "size", "behind"),
    [
        (b'{"op":"a","data":{"b":1}}', 7, 1),
        (b'{"op": "a", "data": {"b": 1}}', 8, 1),
        (b'{"data":{"b":1},"op":"a"}', 7, 10),
        (b'{"op":"a","data":{"b":1},"x":{"b":1}}', 7, 13),
        (b'{"x":{"b":1},"op":"a","data":{"b":1}}', 7, 1),
        (b'{"op":"a","x":{"data":{"b":1}},"data":{"b":1} }', 7, 2),
        (b'{"op":"a","\\u0064ata":{"b":1}}', 7, 1),
        (b'{"op":"a","data":{},"data":{"b":1}}', 7, 1),
        (b'{"op":"a"}', 0, 0),
        (b'{"op":"a","x":{}}', 0, 0),
        (b'{"op":"{}"}', 0, 0),
        (b'{"op":"a","x":"' + b"x" * 300 + b'","data":{"b":1}}', 7, 1),
    ],
)
def test_emp_finds_the_data_in_a_body(body: bytes, size: int, behind: int) -> None:
    (told,) = emp_told(body)
    assert (told.payload_size, told.payload_end) == (size, behind)
    assert told.destination == ("service/{}" if b"{}" in body[:9] else "service/a")


def test_emp_takes_the_last_of_two_operations() -> None:
    (told,) = emp_told(b'{"op":"a","data":{},"op":"b"}')
    assert told.fields == '{"id":1,"op":"b"}'


def test_emp_data_that_is_not_utf_8() -> None:
    (told,) = emp_told(b'{"op":"a","data":{"b":"\xff"}}')
    assert told == ("malformed", "application data is not UTF-8: invalid start byte")


def test_emp_data_that_is_nested_too_deep() -> None:
    (told,) = emp_told(b'{"op":"a","data":{"b":' + b"[" * 5000 + b"]" * 5000 + b"}}")
    assert told == ("malformed", "application data is not as it should be: nested too deep")


def test_emp_keeps_a_token_to_itself() -> None:
    (told,) = emp_told(b'{"op":"$authenticate","data":{"token":"secret"}}')
    assert told.payload is None and "secret" not in repr(told)


def test_emp_only_a_delivery_has_the_hubs_id() -> None:
    data = b'{"op":"%s","data":{"destination":"queue/q","text":"t","id":9}}'
    published, answer, delivered, _ = emp_told(
        data % b"$publish",
        b'{"status":"success","data":{"id":5}}',
        data % b"$deliver",
        b'{"status":"success","data":{}}',
    )
    assert (published.message_id, answer.message_id, delivered.message_id) == (None, 5, 9)
    assert published.payload == delivered.payload == b"t"
    assert answer.kind == "acknowledgement" and answer.destination == "queue/q"


# ------------------------------------------------------------------------------------------ eMQP

msgids = st.sampled_from(["1", "2", 'ü"\\', "x" * 300])
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
    ]
)
timed = st.tuples(text, outcomes, text) | st.tuples(st.none(), outcomes, st.none())
emqp_frames = st.one_of(
    st.builds(emqp.Request, msgids, queues, headers, outcomes),
    st.builds(emqp.Reply, msgids, outcomes | msgids.map(str.encode), st.none() | msgids),
    st.builds(emqp.Publish, msgids, queues, st.none() | headers, outcomes),
    st.builds(lambda a, b, c, d: emqp.Schedule(a, b, c, *d), msgids, queues, headers, timed),
    st.builds(lambda a, b, c, d: emqp.Unschedule(a, b, c, *d), msgids, queues, headers, timed),
    st.builds(emqp.Ack, msgids, msgids),
    st.builds(emqp.Ready, msgids),
    st.builds(emqp.Heartbeat, msgids, text),
    st.builds(emqp.Inform, msgids, text, text),
    st.builds(emqp.Kbai, msgids),
    st.builds(emqp.Admin, msgids, st.sampled_from(emqp.ADMIN_COMMANDS)),
)
more_parts = st.lists(st.sampled_from([b"", b"1", b"x" * 256]), max_size=2)


def with_long_heads(parts: list[bytes]) -> bytes:
    """As nobody has to write short parts, but may."""
    return b"".join(
        bytes((zmtp.LONG | (zmtp.MORE if index < len(parts) - 1 else 0),))
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
        zmtp.serialize_message([b"", emqp.VERSION, b"REQUEST", b"1"]),
        zmtp.serialize_message([b"", emqp.VERSION, b"REPLY", b"\xff", b"x"]),
    ]
)


@settings(max_examples=200)
@given(
    sent=st.lists(st.tuples(st.booleans(), emqp_messages | others), max_size=8),
    payloads=st.booleans(),
)
def test_emqp_content(sent: Said, payloads: bool) -> None:
    said = [(True, handshake("DEALER")), (False, handshake("ROUTER")), *sent]
    check(Talk.of("emqp", said), payloads=payloads)


@settings(max_examples=30)
@given(
    topics=st.lists(st.tuples(queues, outcomes), max_size=5),
    subscribed=st.lists(st.sampled_from([b"\1a", b"\0a", b""]), max_size=3),
)
def test_emqp_publications(topics: list[tuple[str, bytes]], subscribed: list[bytes]) -> None:
    said = [(True, handshake("SUB")), (False, handshake("PUB"))]
    said += [(True, zmtp.serialize_message([each])) for each in subscribed]
    said += [(False, zmtp.serialize_message([topic.encode(), body])) for topic, body in topics]
    check(Talk.of("emqp", said))


def emqp_told(*frames: tuple[bool, Frame]) -> list[Any]:
    """Of commands alone."""
    said = [(forward, zmtp.serialize_message(emqp.serialize(frame))) for forward, frame in frames]
    opening = [(True, handshake("DEALER")), (False, handshake("ROUTER"))]
    return told_of("emqp", *opening, *said)[5::2]


def test_emqp_a_body_like_what_follows_it_has_its_own_place() -> None:
    told = emqp_told((False, emqp.Reply("9", b"5", "5")))[0]
    assert (told.payload_size, told.payload_end) == (1, 3)


def test_emqp_a_result_that_is_no_text_is_a_result() -> None:
    (told,) = emqp_told((False, emqp.Reply("9", b'{"error":"\xff"}', "1")))
    assert (told.kind, told.status) == ("response", "success")


def test_emqp_a_request_its_receipt_and_its_result() -> None:
    asked, receipt, result = emqp_told(
        (True, emqp.Request("1", "jobs", "reply-requested,tries:3", b"job")),
        (False, emqp.Reply("2", b"1")),
        (False, emqp.Reply("3", b'{"error":"no"}', "1")),
    )
    assert (asked.kind, asked.properties) == ("request", '{"tries":3}')
    assert (receipt.kind, receipt.identifier) == ("acknowledgement", "1")
    assert (result.kind, result.status, result.identifier) == ("response", "failure", "1")
    assert asked.destination == receipt.destination == result.destination == "queue/jobs"


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
    [epoxy.Config(), epoxy.ProtocolError(3), epoxy.ProtocolError(99, comm.Error(1, "why"))]
)


@settings(max_examples=200)
@given(
    sent=st.lists(st.tuples(st.booleans(), epoxy_messages() | epoxy_others), max_size=8),
    payloads=st.booleans(),
)
def test_epoxy_content(sent: list[tuple[bool, Any]], payloads: bool) -> None:
    said = [(forward, epoxy.serialize(frame)) for forward, frame in sent]
    told: list[Told] = check(Talk.of("epoxy", said), payloads=payloads)
    texts = [what.fields for *_, what in told if isinstance(what, Described)]
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
    first, second = told_of(
        "epoxy", (True, epoxy.serialize(asked)), (False, epoxy.serialize(answered))
    )
    assert (first.kind, first.destination, first.payload) == ("publish", "topic/t", b"hi")
    assert (second.kind, second.destination, second.status) == (
        "acknowledgement",
        "topic/t",
        "success",
    )
