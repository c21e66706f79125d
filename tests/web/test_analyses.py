"""Uploaded captures: what is read of them, for whom, and within which limits."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import logging
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from crosswire.access import User
from crosswire.config import HttpSettings
from crosswire.errors import CrosswireError
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap
from crosswire.web.held_analyses import HeldAnalyses
from crosswire.wire.emp.frames import Hello, Request, serialize, serialize_call
from tests.web.conftest import StartWeb, WebHub

ANNA = User(name="anna", token="the-token-of-anna", consume=("queue/a",))
BOB = User(name="bob", token="the-token-of-bob")
ROOT = User(name="root", token="the-token-of-root", administer=True)


def capture(folder: Path, **options: Any) -> bytes:
    """A capture of all protocols."""
    file = folder / "sample.pcap"
    traffic = SampleTraffic(**{"connections": 5, "messages": 20, **options})
    write_pcap(file, [each for talk in traffic.conversations() for each in packets(talk)])
    return file.read_bytes()


async def upload(
    web: WebHub, data: bytes, *, token: str | None = None, **query: object
) -> tuple[int, Any]:
    head = f"POST /v1/analyses?{urlencode(query)} HTTP/1.1\nhost: 127.0.0.1\n"
    head += "content-type: application/octet-stream\n"
    if token is not None:
        head += f"authorization: Bearer {token}\n"
    status, body = await web.ask(head.strip(), data)
    return status, json.loads(body)


async def analyzed(web: WebHub, data: bytes, *, token: str | None = None, **query: object) -> Any:
    """An analysis that is done."""
    status, row = await upload(web, data, token=token, **query)
    assert status == 200, row
    async with asyncio.timeout(60):
        while row["state"] not in ("ready", "failed"):
            await asyncio.sleep(0.05)
            row = await web.get(f"/v1/analyses/{row['id']}", token=token)
    return row


async def test_a_capture_of_all_protocols(web: WebHub, tmp_path: Path) -> None:
    row = await analyzed(web, gzip.compress(capture(tmp_path)), name="all.pcap.gz")
    assert (row["state"], row["error"], row["notes"]) == ("ready", "", [])
    assert set(row["protocols"]) == {"emp", "emqp", "relink", "epoxy", "micromsg2"}
    assert row["name"] == "all.pcap.gz" and row["violations"] == 0
    path = f"/v1/analyses/{row['id']}"
    connections = (await web.get(f"{path}/connections"))["connections"]
    assert [each["protocol"] for each in connections] == list(SampleTraffic().protocols)
    assert sum(each["frames"] for each in connections) == sum(row["frames"].values())
    assert connections[0]["client"] == "10.0.0.0:40000" and connections[0]["end"] == "closed"

    # A page after the other.
    seen: list[Any] = []
    cursor = ""
    while True:
        page = await web.get(f"{path}/frames", limit=100, cursor=cursor)
        seen += page["frames"]
        cursor = page["next"]
        if not cursor:
            break
    assert [each["number"] for each in seen] == list(range(1, sum(row["frames"].values()) + 1))

    async def chosen(**query: Any) -> list[Any]:
        found: list[Any] = (await web.get(f"{path}/frames", **query))["frames"]
        return found

    assert {each["protocol"] for each in await chosen(protocol="relink")} == {"relink"}
    assert {each["frame"] for each in await chosen(frame="publish")} == {"publish"}
    assert {each["connection"] for each in await chosen(connection=4)} == {"4"}
    orders = await chosen(destination="orders", protocol="emp")
    assert {each["destination"] for each in orders} == {"queue/orders"}
    assert {each["frame"] for each in orders} == {"request", "response"}
    first = orders[0]
    talk = await chosen(connection=first["connection"], conversation=first["conversation"])
    assert [each["frame"] for each in talk] == ["request", "response"]
    assert all(
        "guarantee" in each["summary"] for each in await chosen(text="GUARANTEE", frame="request")
    )
    assert await chosen(violations="true") == []
    # By bytes that are hex in the fields.
    assert await chosen(text='"value": 1', frame="reply")

    detail = await web.get(f"{path}/frames/{first['number']}")
    assert detail["fields"]["op"] == "$publish" and detail["length"] == len(detail["hex"]) // 2
    (op,) = [each for each in detail["ranges"] if each["path"] == ["op"]]
    assert bytes.fromhex(detail["hex"])[op["start"] : op["end"]] == b'"$publish"'
    inner = [each["path"] for each in detail["ranges"]]
    assert ["data", "destination"] in inner and ["length"] in inner

    assert (await web.delete(path))["removed"] == row["id"]
    assert not list((Path(web.server.config.data) / "analyses").iterdir())


async def test_raw_bytes_violations_and_secrets(web: WebHub) -> None:
    call = serialize_call("$authenticate", b'{"token":"the-secret"}')
    bad = b"\x00\x00\x00\x04\x63\x00\x00\x00"
    data = serialize(Hello(1)) + serialize(Request(1, call)) + bad
    row = await analyzed(web, data)
    assert row["protocols"] == {"emp": 3} and row["violations"] == 1
    path = f"/v1/analyses/{row['id']}/frames"
    (frame,) = (await web.get(path, violations="true"))["frames"]
    assert frame["violation"] == {
        "error": "unknown",
        "reason": "message type 99 is not defined",
        "clause": "EMP, Message types",
        "page": "protocols/emp",
    }
    assert (await web.get(f"{path}/{frame['number']}"))["hex"] == bad.hex()
    secret = await web.get(f"{path}/2")
    assert secret["masked"] and secret["fields"]["data"] == {"token": "*" * len("the-secret")}
    assert b"the-secret".hex() not in json.dumps(secret)
    assert (await web.get(path, text="the-secret"))["frames"] == []


async def test_raw_bytes_of_a_named_protocol(web: WebHub) -> None:
    data = bytes.fromhex("0000000000000000") + bytes(16)
    row = await analyzed(web, data, protocol="relink", sender="listener", name="listener.bin")
    assert row["frames"] == {"listener-hello": 1, "listener-version": 1}
    (connection,) = (await web.get(f"/v1/analyses/{row['id']}/connections"))["connections"]
    assert connection["name"] == "raw relink from listener" and connection["first"] is None
    wrong = await analyzed(web, data, protocol="relink", sender="nobody")
    assert wrong["state"] == "failed" and "connector, listener" in wrong["error"]


async def test_other_ports_are_named(web: WebHub, tmp_path: Path) -> None:
    # The beginning is missing, so that only the port shows which protocol it is.
    file = tmp_path / "late.pcap"
    talk = SampleTraffic(messages=30).conversation(0, "emp")
    write_pcap(file, list(packets(talk))[8:])
    data = file.read_bytes().replace((5040).to_bytes(2), (7000).to_bytes(2))
    assert (await analyzed(web, data))["protocols"] == {}
    row = await analyzed(web, data, ports="7000=emp")
    assert row["protocols"]["emp"] > 10
    (connection,) = (await web.get(f"/v1/analyses/{row['id']}/connections"))["connections"]
    assert connection["late"]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET / HTTP/1.1\r\n", "name the protocol"),
        (gzip.compress(b"nothing of that kind", mtime=0), "mine.pcap is no capture file"),
        (b"\xd4\xc3\xb2\xa1", "mine.pcap ends in the middle of a record, at byte 0"),
    ],
)
async def test_what_is_no_capture(web: WebHub, data: bytes, error: str) -> None:
    row = await analyzed(web, data, name="mine.pcap")
    assert row["state"] == "failed" and error in row["error"]
    with pytest.raises(CrosswireError, match=r"mine\.pcap|name the protocol"):
        await web.get(f"/v1/analyses/{row['id']}/frames")


async def test_a_capture_without_packets(web: WebHub) -> None:
    row = await analyzed(web, b"\xd4\xc3\xb2\xa1\x02\0\x04\0" + bytes(8) + b"\0\0\1\0\1\0\0\0")
    assert (row["state"], row["protocols"]) == ("ready", {})


async def test_a_capture_that_ends_in_the_middle(web: WebHub, tmp_path: Path) -> None:
    data = capture(tmp_path)
    row = await analyzed(web, data[: len(data) // 2 + 7], name="cut.pcap")
    assert row["state"] == "ready" and row["protocols"]
    assert any("cut.pcap" in note for note in row["notes"])


async def test_analyses_belong_to_their_users(start_web: StartWeb, tmp_path: Path) -> None:
    web = await start_web(users=(ANNA, BOB, ROOT))
    data = capture(tmp_path, connections=1, messages=2)
    assert (await upload(web, data))[0] == 401
    row = await analyzed(web, data, token=ANNA.token)
    path = f"/v1/analyses/{row['id']}"
    listed = await web.get("/v1/analyses", token=ANNA.token)
    assert [each["id"] for each in listed["analyses"]] == [row["id"]]
    for user in (BOB, ROOT):
        assert (await web.get("/v1/analyses", token=user.token))["analyses"] == []
        for more in ("", "/connections", "/frames", "/frames/1"):
            with pytest.raises(CrosswireError, match="there is no analysis"):
                await web.get(path + more, token=user.token)
        with pytest.raises(CrosswireError, match="there is no analysis"):
            await web.delete(path, token=user.token)


async def test_a_users_oldest_analysis_makes_room(
    start_web: StartWeb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.web.held_analyses._MOST_EACH", 2)
    monkeypatch.setattr("crosswire.web.held_analyses._MOST", 3)
    web = await start_web(users=(ANNA, BOB, ROOT))
    data = capture(tmp_path, connections=1, messages=1)
    own = [(await analyzed(web, data, token=ANNA.token))["id"] for _ in range(3)]
    listed = (await web.get("/v1/analyses", token=ANNA.token))["analyses"]
    assert [each["id"] for each in listed] == own[:0:-1]
    await analyzed(web, data, token=BOB.token)
    # All are taken, and none of them is root's.
    status, refused = await upload(web, data, token=ROOT.token)
    assert status == 503 and "too many analyses" in refused["description"]
    assert len(list((Path(web.server.config.data) / "analyses").iterdir())) == 3


async def test_analyses_expire(
    web: WebHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = await analyzed(web, capture(tmp_path, connections=1, messages=1))
    monkeypatch.setattr("crosswire.web.held_analyses._KEPT_S", 0.0)
    other = await analyzed(web, capture(tmp_path, connections=1, messages=1))
    assert other["id"] != row["id"]
    with pytest.raises(CrosswireError, match="it may have expired"):
        await web.get(f"/v1/analyses/{row['id']}")


async def test_too_large_and_too_slow(start_web: StartWeb, monkeypatch: pytest.MonkeyPatch) -> None:
    web = await start_web(http=HttpSettings(capture_bytes=1000))
    assert (await upload(web, bytes(1001)))[0] == 413
    chunked = (
        b"POST /v1/analyses HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
        b"content-type: application/octet-stream\r\nconnection: close\r\n\r\n"
    )
    assert (await web.raw(chunked + b"3e9\r\n" + bytes(1001) + b"\r\n0\r\n\r\n"))[0] == 413
    monkeypatch.setattr("crosswire.web.app._UPLOAD_S", 0.1)
    assert (await web.raw(chunked + b"3\r\nabc\r\n"))[0] == 408
    assert (await upload(web, b""))[0] == 400
    assert not list((Path(web.server.config.data) / "analyses").iterdir())
    with pytest.raises(CrosswireError, match="content type"):
        await web.post("/v1/analyses", {})


async def test_a_process_that_takes_too_long_is_killed(
    web: WebHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crosswire.web.held_analyses._WALL_S", 0.0)
    row = await analyzed(web, capture(tmp_path))
    assert row["state"] == "failed" and "takes longer than 0 s" in row["error"]


async def test_a_process_that_fails_is_reported(
    web: WebHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "crosswire").mkdir()
    (tmp_path / "crosswire" / "__init__.py").write_text("raise RuntimeError('broken')")
    with caplog.at_level(logging.ERROR, "crosswire.web"):
        row = await analyzed(web, b"anything")
    assert row["state"] == "failed" and "the analyzer failed" in row["error"]
    assert "broken" in str([vars(each) for each in caplog.records])


async def test_an_analysis_that_the_disk_refuses_names_no_path(
    web: WebHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/var/lib/crosswire/analyses/x")

    monkeypatch.setattr(HeldAnalyses, "_run", fail)
    row = await analyzed(web, b"anything")
    assert row["state"] == "failed"
    assert row["error"] == f"it can't be analyzed: {os.strerror(errno.ENOSPC)}"


async def test_a_stopping_hub_ends_processes_and_removes_files(
    start_web: StartWeb, tmp_path: Path
) -> None:
    web = await start_web()
    status, row = await upload(web, capture(tmp_path))
    assert status == 200 and row["state"] in ("waiting", "running")
    await web.server.stop()
    assert not list((Path(web.server.config.data) / "analyses").iterdir())


@pytest.mark.parametrize(
    "query",
    [{"ports": "7000"}, {"ports": "70000=emp"}, {"ports": "7=x"}, {"protocol": "x"}, {"other": 1}],
)
async def test_wrong_parameters(web: WebHub, query: dict[str, Any]) -> None:
    assert (await upload(web, b"x", **query))[0] == 400


async def test_a_users_captures_are_read_one_at_a_time(start_web: StartWeb, tmp_path: Path) -> None:
    """So that one user does not occupy both processes."""
    web = await start_web(users=(ANNA, BOB))
    data = capture(tmp_path)
    for token in (ANNA.token, ANNA.token, BOB.token):
        assert (await upload(web, data, token=token))[0] == 200

    async def states(token: str | None) -> list[str]:
        rows = (await web.get("/v1/analyses", token=token))["analyses"]
        return [each["state"] for each in rows]

    async with asyncio.timeout(60):
        while (await states(ANNA.token)) + (await states(BOB.token)) != ["ready"] * 3:
            assert (await states(ANNA.token)).count("running") < 2
            await asyncio.sleep(0.02)
