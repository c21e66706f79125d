"""The pipeline's last report over HTTP: who may open it, how often, and under which policy."""

from __future__ import annotations

import asyncio
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from crosswire.access import User
from crosswire.errors import RequestFailed
from crosswire.web.report_tickets import TICKET_S, ReportTickets
from tests.web.conftest import StartWeb, WebHub

ROOT = User(name="root", token="the-secret-of-root", administer=True)
EYE = User(name="eye", token="the-secret-of-the-eye", observe=True)
ANNA = User(name="anna", token="the-secret-of-anna", produce=("queue/a",))
SEAL = "sha256-" + "A" * 43 + "="
PAGE = f"<!doctype html><meta http-equiv=x content=\"script-src '{SEAL}'\"><p>the report"


@pytest.fixture
async def web(start_web: StartWeb) -> WebHub:
    return await start_web(users=(ROOT, EYE, ANNA))


def report_file(web: WebHub) -> Path:
    return Path(web.server.config.data) / "report.html"


async def fetch(web: WebHub, path: str) -> tuple[int, str, dict[str, str]]:
    def ask() -> tuple[int, str, dict[str, str]]:
        connection = HTTPConnection("127.0.0.1", web.port, timeout=20)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode(), dict(response.getheaders())
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def opened(web: WebHub, token: str = "the-secret-of-root") -> str:
    answer: dict[str, Any] = await web.post("/v1/report/open", {}, token=token)
    return str(answer["path"])


async def test_a_report_is_opened_once_without_a_token(web: WebHub) -> None:
    report_file(web).write_text(PAGE)
    state = await web.get("/v1/report", token="the-secret-of-root")
    assert state["path"] == str(report_file(web))
    assert state["size_bytes"] == len(PAGE) and state["made"] is not None
    path = await opened(web)
    status, body, headers = await fetch(web, path)
    assert (status, body) == (200, PAGE)
    policy = headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none';")
    assert f"script-src '{SEAL}'" in policy and "allow-same-origin" not in policy
    assert headers["cache-control"] == "no-store"
    status, body, _ = await fetch(web, path)
    assert status == 404 and "the report" not in body.replace("of the report was", "")


async def test_a_page_without_a_seal_runs_no_script(web: WebHub) -> None:
    report_file(web).write_text("<script>1</script>" + " " * 5000 + f"script-src '{SEAL}'")
    _, _, headers = await fetch(web, await opened(web))
    assert "script-src 'none'" in headers["content-security-policy"]


async def test_without_a_report_nothing_is_opened(web: WebHub) -> None:
    assert (await web.get("/v1/report", token="the-secret-of-root"))["made"] is None
    with pytest.raises(RequestFailed, match="there is no report"):
        await opened(web)
    report_file(web).mkdir()
    with pytest.raises(RequestFailed, match="there is no report"):
        await opened(web)


async def test_only_administrators_open_it(web: WebHub) -> None:
    report_file(web).write_text(PAGE)
    for token in ("the-secret-of-the-eye", "the-secret-of-anna"):
        with pytest.raises(RequestFailed) as caught:
            await opened(web, token)
        assert caught.value.code == "forbidden"
    with pytest.raises(RequestFailed):
        await web.get("/v1/report", token="the-secret-of-anna")
    assert (await fetch(web, "/report/guess"))[0] == 404


async def test_a_right_that_is_gone_opens_nothing(web: WebHub) -> None:
    report_file(web).write_text(PAGE)
    path = await opened(web)
    web.server.reload(msgspec.structs.replace(web.server.config, users=(EYE, ANNA)))
    assert (await fetch(web, path))[0] == 404


def test_tickets_expire_and_are_few() -> None:
    tickets = ReportTickets()
    first = tickets.issue(0.0, lambda: True)
    assert not tickets.redeem(first, TICKET_S)
    first = tickets.issue(0.0, lambda: True)
    others = [tickets.issue(0.0, lambda: True) for _ in range(64)]
    assert not tickets.redeem(first, 1.0)
    assert all(tickets.redeem(each, 1.0) for each in others)
    assert not tickets.redeem(tickets.issue(0.0, lambda: False), 1.0)
