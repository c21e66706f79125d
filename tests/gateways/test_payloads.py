"""Payloads at the edge: JSON, Bond and Blob."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec
import pytest

from crosswire.bond import hub_module, idl, marshal
from crosswire.bond.dialect import Dialect
from crosswire.envelope import Envelope
from crosswire.errors import InvalidEnvelope
from crosswire.gateways.payloads import (
    BOND,
    BYTES,
    JSON,
    TEXT,
    JsonPayload,
    Schemas,
    from_body,
    to_body,
    unwrap,
    wrap,
)

CALC = Path(__file__).parents[2] / "examples" / "calc.bond"
METHOD = "service/examples.calc.Calc/Calculate"
PARAMS = idl.load(CALC).struct("examples.calc.Params")
RESULT = idl.load(CALC).struct("examples.calc.Result")
BLOB = hub_module().struct("crosswire.Blob")
ENCODINGS = [marshal.FAST_V1, marshal.COMPACT_V1, marshal.COMPACT_V2]

schemas = Schemas((str(CALC),))


def params(x: int = 67) -> bytes:
    return marshal.marshal(PARAMS.python_class(x=x, y=87, operation=3), PARAMS)


def request(payload: bytes, content_type: str, destination: str = METHOD) -> Envelope:
    return Envelope(
        destination=destination, kind="request", payload=payload, content_type=content_type
    )


COMPLETE = [b"2", b" 2\n", b"null", b'"h\xc3\xa9"', b'{ "n": 12345678901234567890 }', b"[1.50]"]
INCOMPLETE = [b"", b" ", b"2 3", b"{", b"nul", b"NaN", b"01", b'"\xff"', b"[" * 5000, b"\0", b"{}x"]


@pytest.mark.parametrize("content_type", [JSON, TEXT, BYTES, "image/png", ""])
@pytest.mark.parametrize("payload", COMPLETE)
def test_a_complete_json_text_crosses_unchanged_whatever_it_is_called(
    payload: bytes, content_type: str
) -> None:
    body = to_body(request(payload, content_type))
    assert isinstance(body.json, msgspec.Raw) and bytes(body.json) == payload


@pytest.mark.parametrize("content_type", [JSON, TEXT, BYTES, "image/png", ""])
@pytest.mark.parametrize("payload", INCOMPLETE)
def test_what_is_no_json_is_text_or_bytes(payload: bytes, content_type: str) -> None:
    body = to_body(request(payload, content_type))
    if content_type == TEXT and body.text is not None:
        assert body.text.encode() == payload
    else:
        assert base64.b64decode(body.base64 or "") == payload


@pytest.mark.parametrize("content_type", [JSON, TEXT, BYTES])
def test_json_becomes_bond_by_the_schema_whatever_it_is_called(content_type: str) -> None:
    payload = b'{"x": 67, "y": 87, "operation": "Mul"}'
    assert schemas.to_bond(request(payload, content_type)) == params()


def test_bond_becomes_json_by_the_schema() -> None:
    converted = schemas.to_json(request(params(), BOND))
    assert converted.payload == b'{"x":67,"y":87,"operation":"Mul"}'
    assert converted.content_type == JSON
    assert converted.intact()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_encoding_becomes_json(encoding: Dialect) -> None:
    payload = marshal.marshal(PARAMS.python_class(x=1), PARAMS, protocol=encoding)
    assert schemas.to_json(request(payload, BOND)).payload.startswith(b'{"x":1,')


def test_a_response_has_a_schema_of_its_own() -> None:
    answer = Envelope(
        destination=METHOD, kind="response", payload=b'{"z": 5829}', content_type=JSON
    )
    assert marshal.unmarshal(schemas.to_bond(answer), RESULT).z == 5829


def test_an_event_has_the_schema_of_its_method() -> None:
    event = Envelope(
        destination="topic/examples.calc.Calc/Note",
        kind="publish",
        payload=params(),
        content_type=BOND,
    )
    assert schemas.to_json(event).content_type == JSON


def test_a_queue_that_is_named_like_a_method_has_no_schema() -> None:
    assert schemas.find("send", "queue/examples.calc.Calc/Calculate") is None


def test_no_payload_is_a_struct_of_defaults() -> None:
    payload = schemas.to_bond(request(b"", BYTES))
    assert marshal.unmarshal(payload, PARAMS) == PARAMS.python_class()


@pytest.mark.parametrize(
    "payload", [b"\x00\xff", b"[1]", b'{"x": "many"}', b'{"operation": "Root"}']
)
def test_what_does_not_fit_the_schema_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidEnvelope, match=r"is not a examples\.calc\.Params"):
        schemas.to_bond(request(payload, JSON))


def test_bond_that_does_not_fit_the_schema_is_refused() -> None:
    with pytest.raises(InvalidEnvelope):
        schemas.to_json(request(marshal.COMPACT_V1.magic + b"\xff", BOND))


@pytest.mark.parametrize("destination", [METHOD, "service/unknown/Method"])
def test_bond_stays_the_bytes_that_it_is(destination: str) -> None:
    payload = params()
    assert schemas.to_bond(request(payload, BOND, destination)) is payload


@pytest.mark.parametrize(
    ("payload", "content_type"),
    [(b"{}", JSON), ("h\u00e9".encode(), TEXT), (b"", BYTES), (bytes(1 << 20), BYTES)],
)
def test_without_a_schema_anything_travels_in_a_blob(payload: bytes, content_type: str) -> None:
    destination = "service/unknown/Method"
    wrapped = schemas.to_bond(request(payload, content_type, destination))
    assert schemas.from_bond("request", destination, wrapped) == (payload, content_type)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_blob_is_known_in_any_encoding(encoding: Dialect) -> None:
    blob = BLOB.python_class(data=b"x", content_type="text/plain; charset=utf-8")
    payload = marshal.marshal(blob, BLOB, protocol=encoding)
    assert unwrap(payload) == (b"x", "text/plain; charset=utf-8")


@pytest.mark.parametrize(
    "payload",
    [
        wrap(b"x", ""),
        wrap(b"x", "and/or"),
        wrap(b"x", "text/"),
        wrap(b"x", "text/plain") + b"/",
        params(),
        b"CB\x01\x00/",
        b"text/plain",
        b"",
    ],
)
def test_what_only_resembles_a_blob_is_none(payload: bytes) -> None:
    assert unwrap(payload) is None


def test_a_blob_with_a_schema_stays_closed() -> None:
    payload = wrap(b"x", TEXT)
    assert schemas.from_bond("request", METHOD, payload) == (payload, BOND)


@pytest.mark.parametrize("payload", [b"", b"CB", b"CB\x03\x00\x00", b"{}"])
def test_what_is_not_marshalled_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidEnvelope, match="not marshalled Bond"):
        schemas.from_bond("request", METHOD, payload)


@pytest.mark.parametrize(
    ("payload", "content_type"),
    [(b'{"a":1}', JSON), (b"7", JSON), ("h\u00e9".encode(), TEXT), (b"\x00\xff", BYTES)],
)
def test_a_body_gives_back_what_it_was_made_from(payload: bytes, content_type: str) -> None:
    assert from_body(to_body(request(payload, content_type))) == (payload, content_type)


@pytest.mark.parametrize("content_type", [JSON, TEXT])
def test_a_content_type_that_lies_leads_to_base64(content_type: str) -> None:
    assert to_body(request(b"\xff", content_type)) == JsonPayload(base64="/w==")
