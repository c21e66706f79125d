"""A dead letter that was edited, or replayed elsewhere, arrives as it is now in every protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from crosswire.envelope import Envelope, encode
from crosswire.gateways.edits import refit
from crosswire.gateways.emqp.messages import HEADERS, MSGID, QUEUE
from crosswire.gateways.payloads import BYTES, JSON, TEXT
from crosswire.gateways.relink.messages import Origin, from_parts, to_parts
from crosswire.server.server import GATEWAYS
from tests.e2e.bridging import everybody
from tests.e2e.native_peers import MARKING
from tests.e2e.parties import Party, RelinkParty
from tests.web.conftest import StartWeb, WebHub, bury

ORIGIN = Origin("queue/q", "send", "c", "")
OLD = b'{"wrong": "and so much longer than what comes in place of it"}'


FORMS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    (JSON, {"old": 1}, False),
    (JSON, {"old": 1}, True),
    (BYTES, {}, True),
)
"""Content type, properties, and whether it has what only its own protocol understands."""

EDITS: dict[str, tuple[dict[str, Any], bytes, str]] = {
    "json": ({"json": {"right": True}}, b'{"right":true}', JSON),
    "text": ({"text": "much longer " * 99}, b"much longer " * 99, TEXT),
    "base64": ({"base64": "AP8="}, b"\x00\xff", BYTES),
    "nothing": ({"text": ""}, b"", TEXT),
}


async def send(
    producer: Party,
    destination: str,
    payload: bytes,
    content_type: str,
    properties: dict[str, Any],
    *,
    marked: bool,
) -> None:
    """With the mark of the producer's protocol, where it has one and it is asked for."""
    if marked and producer.name in MARKING:
        async with MARKING[producer.name](producer.ports) as native:
            await native.send_marked(destination, payload, content_type, properties)
    else:
        await producer.produce(destination, payload, content_type, properties)


async def edit_and_replay(
    web: WebHub, producer: Party, destination: str, edit: dict[str, Any]
) -> None:
    """A letter of every form that the producer's protocol has."""
    for content_type, properties, marked in FORMS:
        old = OLD if content_type == JSON else b"\0" + OLD
        await send(producer, "queue/q/dead", old, content_type, properties, marked=marked)
        await web.hub.committed()
        (dead_letter,) = (await web.get("/v1/dead/letters", queue="q"))["letters"]
        await web.patch(f"/v1/dead/letters/{dead_letter['id']}", {"queue": "q", **edit})
        asked = {"queue": "q", "all": True, "destination": destination}
        assert (await web.post("/v1/dead/replays", asked))["replayed"] == 1


@pytest.mark.parametrize("kind", EDITS)
async def test_what_was_edited_arrives_whole(start_web: StartWeb, kind: str) -> None:
    """From every protocol to every protocol."""
    web = await start_web(listen=dict.fromkeys(GATEWAYS, "127.0.0.1:0"))
    change, payload, content_type = EDITS[kind]
    async with everybody(web.server) as producers, everybody(web.server) as consumers:
        for consumer in consumers:
            destination = f"queue/to-{consumer.name}"
            inbox = await consumer.consume(destination)
            for producer in producers:
                for properties in (None, {"new": 2}):
                    edit = change if properties is None else change | {"properties": properties}
                    await edit_and_replay(web, producer, destination, edit)
                    for form in FORMS:
                        got = await asyncio.wait_for(inbox.get(), 10)
                        case = (producer.name, consumer.name, form, properties)
                        assert got.payload == payload, case
                        assert got.content_type in (content_type, BYTES), case
                        expected = form[1] if properties is None else properties
                        if isinstance(producer, RelinkParty) and form[2] and properties is None:
                            expected = {}  # its parts were more than properties and a payload
                        assert got.properties == expected, case


async def test_parts_that_were_not_edited_arrive_as_they_came(web: WebHub) -> None:
    parts = (b"1", b"", b"22", b"333")
    await web.hub.produce([from_parts(parts, ORIGIN).replace(destination="queue/q/dead")], 1.0)
    (dead_letter,) = (await web.get("/v1/dead/letters", queue="q"))["letters"]
    edit = {"queue": "q", "properties": {"n": 1}}
    await web.patch(f"/v1/dead/letters/{dead_letter['id']}", edit)
    edited = web.hub.dead_letters.get("queue/q/dead", dead_letter["id"]).envelope
    assert to_parts(edited) == parts


async def test_why_it_died_does_not_get_into_the_headers(web: WebHub) -> None:
    (dead_letter,) = await bury(web, "x")
    envelope = web.hub.dead_letters.get("queue/q/dead", dead_letter).envelope
    headers = envelope.replace(native={**envelope.native, HEADERS: b"guarantee,old:1"})
    web.hub.queue("queue/q/dead").exchange(headers, encode(headers))
    await web.patch(f"/v1/dead/letters/{dead_letter}", {"queue": "q", "properties": {"new": 2}})
    edited = web.hub.dead_letters.get("queue/q/dead", dead_letter).envelope
    assert edited.native[HEADERS] == b"guarantee,new:2"
    assert edited.properties["dead-cause"] == "can't"


def envelope_of(**changes: Any) -> Envelope:
    return Envelope(destination="queue/default", kind="send", payload=OLD, **changes)


def test_sizes_that_do_not_add_up_are_not_believed() -> None:
    """Letters that were edited before sizes followed the payload still carry the old ones."""
    stale = from_parts((b"1", b"22", b"333"), ORIGIN).replace(payload=bytes(50))
    assert to_parts(stale) == (bytes(50),)
    assert to_parts(stale.replace(properties={"n": 1})) == (b'{"n":1}', bytes(50))


def test_headers_follow_properties_and_content_type_and_keep_the_rest() -> None:
    text = b"guarantee,retry-count:3,old:1,content-type:application%2Fjson"
    before = envelope_of(properties={"old": 1}, content_type=JSON, native={HEADERS: text})
    after = refit(before, before.replace(properties={"new": "a,b"}))
    expected = b"guarantee,retry-count:3,new:a%2Cb,content-type:application%2Fjson"
    assert after.native[HEADERS] == expected
    after = refit(before, before.replace(payload=b"x", content_type=TEXT))
    assert after.native[HEADERS] == b"guarantee,retry-count:3,old:1,content-type:text%2Fplain"
    assert refit(before, before.replace(payload=b"{}")).native == before.native


def test_a_class_describes_what_has_the_same_form() -> None:
    before = envelope_of(properties={"dotnet-type": "A.B", "content-type": JSON}, content_type=JSON)
    assert refit(before, before.replace(payload=b"{}")).properties == before.properties
    other = refit(before, before.replace(payload=b"x", content_type=TEXT))
    assert other.properties == {"content-type": TEXT}
    given = before.replace(payload=b"x", content_type=TEXT, properties={"dotnet-type": "C"})
    assert refit(before, given).properties == {"dotnet-type": "C"}


def test_the_queue_frame_belongs_to_the_old_destination() -> None:
    before = envelope_of(native={QUEUE: b"", MSGID: b"1", "epoxy.layer_data": b"l"})
    elsewhere = refit(before, before.replace(destination="queue/other"))
    assert elsewhere.native == {MSGID: b"1", "epoxy.layer_data": b"l"}
    assert refit(before, before.replace(payload=b"x")).native == before.native
