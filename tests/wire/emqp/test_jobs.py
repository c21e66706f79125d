"""The messages of deployed EventMQ: calls, results, and the identity of schedules."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosswire.wire.emqp.jobs import (
    Job,
    failure_of,
    parse_job,
    schedule_identity,
    serialize_job,
    serialize_value,
    value_of,
)
from tests.wire.vectors import load

RECORDED = sorted(
    {
        v["fields"]["message"]
        for v in load("emqp")
        if v.get("frame") in ("request", "schedule") and b'"path"'.hex() in v["fields"]["message"]
    }
)


@pytest.mark.parametrize("message", RECORDED)
def test_recorded_calls_are_read(message: str) -> None:
    job = parse_job(bytes.fromhex(message))
    assert job is not None and job.path.startswith("jobs_demo")


def test_a_call_of_a_method() -> None:
    message = serialize_job("pkg.mod:K.add", [5], {"x": 1}, class_kwargs={"base": 7})
    assert json.loads(message) == [
        "run",
        {
            "callable": "add",
            "path": "pkg.mod:K",
            "args": [5],
            "kwargs": {"x": 1},
            "class_args": [],
            "class_kwargs": {"base": 7},
        },
    ]
    assert parse_job(message) == Job(
        callable="add", path="pkg.mod:K", args=[5], kwargs={"x": 1}, class_kwargs={"base": 7}
    )


def test_arguments_may_be_left_out() -> None:
    job = parse_job(b'["run", {"callable": "f", "path": "m"}]')
    assert job is not None and (job.name, job.args, job.kwargs) == ("m.f", [], {})


@pytest.mark.parametrize("name", ["f", ".f", "m.", ""])
def test_a_callable_has_a_full_name(name: str) -> None:
    with pytest.raises(ValueError, match="full name"):
        serialize_job(name)


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff\xfe", b"{}", b'["run", {}]', b'["stop", {"callable": "f", "path": "m"}]'],
)
def test_other_messages_are_no_calls(message: bytes) -> None:
    assert parse_job(message) is None


@given(st.binary(max_size=50))
def test_any_bytes_have_an_identity(message: bytes) -> None:
    assert parse_job(message) is None
    assert schedule_identity(message) == hashlib.sha1(message).hexdigest()


@pytest.mark.parametrize("message", RECORDED)
def test_the_identity_is_that_of_the_deployed_scheduler(message: str) -> None:
    call = json.loads(bytes.fromhex(message))[1]
    members = ("args", "kwargs", "class_args", "class_kwargs", "path", "callable")
    text = json.dumps({member: call[member] for member in members}, sort_keys=True)
    expected = hashlib.sha1(text.encode()).hexdigest()
    assert schedule_identity(bytes.fromhex(message)) == expected


def test_the_identity_does_not_depend_on_spelling() -> None:
    one = serialize_job("m.f", [1, 2.5, "\u00e9"], {"a": 1, "b": 2})
    other = json.dumps(json.loads(one), indent=3).encode()
    assert one != other and schedule_identity(one) == schedule_identity(other)
    assert schedule_identity(one) != schedule_identity(serialize_job("m.f", [1, 2.5]))


def test_an_incomplete_call_is_identified_by_its_bytes() -> None:
    message = b'["run", {"callable": "f", "path": "m"}]'
    assert schedule_identity(message) == hashlib.sha1(message).hexdigest()


def test_results() -> None:
    assert value_of(serialize_value({"sum": 3})) == {"sum": 3}
    with pytest.raises(ValueError, match="not a worker's result"):
        value_of(b"True")


def test_the_brokers_failure_is_no_result() -> None:
    assert failure_of(b'{"error": "timeout", "attempts": 3}') == ("timeout", 3)
    assert failure_of(b'{"value": 1}') is None
    assert failure_of(b"\xff") is None
