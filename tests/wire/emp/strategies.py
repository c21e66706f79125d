"""EMP for hypothesis: frames, streams, and two ends that have shaken hands."""

from __future__ import annotations

import json

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from crosswire.wire.contract import Connection, Frame
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.emp.frames import (
    Bye,
    Error,
    Hello,
    Ping,
    Pong,
    Request,
    Response,
    Result,
    serialize,
    serialize_call,
    serialize_result,
)
from tests.wire.stream import Stream, pump

identifiers = st.integers(0, 2**64 - 1)
text = st.text(st.characters(codec="utf-8"), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(text, json_values, max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False).encode()
)
calls = st.builds(serialize_call, text, objects)
results = st.builds(
    lambda ok, code, description: serialize_result(
        Result("success") if ok else Result("failure", code, description)
    ),
    st.booleans(),
    st.none() | text,
    text,
)
requests = st.builds(Request, identifiers, calls)
responses = st.builds(Response, identifiers, results)
frames: SearchStrategy[Frame] = st.one_of(
    st.builds(Hello, st.integers(0, 255)),
    st.just(Bye()),
    st.just(Ping()),
    st.just(Pong()),
    st.builds(Error, st.integers(0, 255), text),
    requests,
    responses,
)


def streams(sender: str) -> SearchStrategy[Stream]:
    """What a peer might send after its hello, as far as a decoder can check."""
    return st.lists(frames, max_size=8).map(
        lambda sent: Stream(b"".join(map(serialize, [Hello(1), *sent])))
    )


def open_pair() -> tuple[Connection, Connection]:
    client, server = EmpConnection("client", 0.0), EmpConnection("server", 0.0)
    pump(client, server)
    client.events()
    server.events()
    return client, server
