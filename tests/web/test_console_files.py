"""The console's files over HTTP: open to all, complete, tagged, and under a strict policy."""

from __future__ import annotations

import asyncio
import re
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

import crosswire.web
from crosswire.access import User
from tests.web.conftest import StartWeb, WebHub

FOLDER = Path(crosswire.web.__file__).parent / "console"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*"))
ROOT = User(name="root", token="the-secret-of-root", administer=True)


@pytest.fixture
async def web(start_web: StartWeb) -> WebHub:
    return await start_web(users=(ROOT,))


async def fetch(web: WebHub, path: str, method: str = "GET", **headers: str) -> HTTPResponse:
    def ask() -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", web.port, timeout=20)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            response.body = response.read()  # type: ignore[attr-defined]
            return response
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def test_all_files_are_served_without_a_token(web: WebHub) -> None:
    for name in FILES:
        response = await fetch(web, f"/console/{name}")
        assert response.status == 200, name
        assert response.body == (FOLDER / name).read_bytes()  # type: ignore[attr-defined]
        assert response.headers["x-content-type-options"] == "nosniff"


async def test_the_page_has_a_strict_policy(web: WebHub) -> None:
    response = await fetch(web, "/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["content-type"] == "text/html; charset=utf-8"


async def test_a_file_that_has_not_changed_is_not_sent_again(web: WebHub) -> None:
    first = await fetch(web, "/console/main.js")
    again = await fetch(web, "/console/main.js", **{"if-none-match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")  # type: ignore[attr-defined]
    other = await fetch(web, "/console/main.js", **{"if-none-match": '"another"'})
    assert other.status == 200


@pytest.mark.parametrize(
    "path", ["/console/", "/console/../app.py", "/console/..%2fapp.py", "/console/nothing.js"]
)
async def test_nothing_else_is_served(web: WebHub, path: str) -> None:
    assert (await fetch(web, path)).status == 404


async def test_files_can_only_be_read(web: WebHub) -> None:
    assert (await fetch(web, "/", method="POST")).status == 405


async def test_a_session_is_its_users(web: WebHub) -> None:
    assert (await fetch(web, "/v1/session")).status == 401
    session = await web.get("/v1/session", token=ROOT.token)
    assert session["user"] == "root"
    assert session["administer"] and session["observe"] and not session["open"]
    assert session["role"] == "leader"
    assert session["node"] == web.hub.node


async def test_without_users_a_session_is_open(start_web: StartWeb) -> None:
    session = await (await start_web()).get("/v1/session")
    assert session["open"] and session["administer"] and session["user"] == ""


@pytest.mark.parametrize("name", FILES)
def test_a_file_fetches_nothing_from_elsewhere_and_writes_no_markup(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    addresses = set(re.findall(r"https?://[\w./]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"""style\s*=\s*["']|\son\w+\s*=\s*["']""", text)
