"""Connections without credentials: they keep neither users nor health checks out."""

from __future__ import annotations

import json
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from crosswire.wire.contract import Connection
from crosswire.wire.emp.connection import EmpConnection
from crosswire.wire.epoxy.comm import marshal_credentials
from crosswire.wire.epoxy.connection import EpoxyConnection
from tests.adversary.harness import PATIENCE_S, TOKEN, USERS, Attacker, Target, running
from tests.conftest import TlsPair

KIB = 1024
ADMIN = "the-secret-of-an-administrator"
SETTINGS = f"""
[connections]
connections = 100
[http]
connections = 20
{USERS}
[[users]]
name = "admin"
token = "{ADMIN}"
administer = true
"""


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A hub with room for 100 connections, ten of them without credentials, and 20 of HTTP."""
    with running(tmp_path_factory.mktemp("narrow"), SETTINGS, TOKEN) as target:
        yield target


def get(target: Target, path: str, token: str = "") -> bytes:
    request = urllib.request.Request(target.url + path)
    if token:
        request.add_header("authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        body: bytes = response.read()
        return body


def idle(stack: ExitStack, port: int) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    return stack.enter_context(peer)


def test_silent_peers_hold_no_slot_against_users_and_administrators(narrow: Target) -> None:
    with ExitStack() as stack:
        for _ in range(150):
            idle(stack, narrow.port("emp"))
            idle(stack, narrow.port("http"))
        users = [stack.enter_context(narrow.emp(TOKEN)) for _ in range(30)]
        assert get(narrow, "/healthz")
        state = json.loads(get(narrow, "/v1/state", ADMIN))
        assert state["connections"]["emp"] <= 30 + 10 + 1
        assert state["connections_limit"] == 100
        for user in users:
            user.events.clear()
            user.connection.send_request("$echo", b"{}")
            user.until(lambda user=user: bool(user.events))
            assert user.events[0].succeeded, "a user lost its connection to silent peers"


def test_who_is_silent_for_longest_makes_room(narrow: Target) -> None:
    while json.loads(get(narrow, "/v1/state", ADMIN))["connections"]:
        time.sleep(0.01)  # those of other tests are about to leave
    with ExitStack() as stack:
        first = stack.enter_context(narrow.emp())
        others = [stack.enter_context(narrow.emp())]
        time.sleep(0.02)  # the loop's clock counts milliseconds: the others are silent for less
        others += [stack.enter_context(narrow.emp()) for _ in range(8)]
        # The first is heard of again, so that the second is the longest silent.
        first.events.clear()
        first.connection.send_request("$echo", b"{}")
        first.until(lambda: bool(first.events))
        stack.enter_context(narrow.emp())
        others[0].until(lambda: False)
        assert others[0].connection.closed
        first.events.clear()
        first.connection.send_request("$echo", b"{}")
        first.until(lambda: bool(first.events))
        assert not first.connection.closed


def test_a_peer_has_ten_seconds_to_identify_itself(narrow: Target) -> None:
    """The protocol's goodbye, not before; whoever has identified itself stays."""
    with ExitStack() as stack:
        user = stack.enter_context(narrow.emp(TOKEN))
        connections: list[tuple[str, Connection]] = [
            ("emp", EmpConnection("client", 0.0)),
            ("epoxy", EpoxyConnection("client", 0.0)),
        ]
        began = time.monotonic()
        peers = [
            stack.enter_context(Attacker(narrow.port(name), connection)).opened()
            for name, connection in connections
        ]
        for peer in peers:
            peer.until(lambda: False)
            assert "not identified within 10 s" in str(peer.events[-1].error)
        assert 9.0 < time.monotonic() - began < 20.0
        user.events.clear()
        user.connection.send_request("$echo", b"{}")
        user.until(lambda: bool(user.events))
        assert user.events[0].succeeded


@pytest.mark.parametrize("size", [60 * KIB, 70 * KIB])
def test_emp_frames_are_small_until_the_peer_is_known(narrow: Target, size: int) -> None:
    data = b'{"a":"%b"}' % (b"x" * size)
    for token in ("", TOKEN):
        with narrow.emp(token) as peer:
            peer.events.clear()
            peer.connection.send_request("$echo", data)
            peer.until(lambda peer=peer: bool(peer.events))
            is_accepted = not peer.connection.closed and peer.events[0].succeeded
        assert is_accepted == (bool(token) or size < 64 * KIB)


def test_epoxy_takes_a_large_payload_after_credentials_in_the_same_frame(narrow: Target) -> None:
    payload = b"CB\x01\x00" + bytes(70 * KIB)
    for token, is_accepted in (("", False), ("nobody's-token-at-all", False), (TOKEN, True)):
        with narrow.epoxy() as peer:
            peer.events.clear()
            credentials = marshal_credentials(token) if token else None
            peer.connection.send_request("mallory", "m", payload, layer_data=credentials)
            peer.until(lambda peer=peer: bool(peer.events))
            # Nobody serves it: what counts is that the frame was read.
            assert peer.connection.closed != is_accepted, token


@pytest.mark.parametrize("name", ["emqp-clients", "emqp-workers", "micromsg2"])
def test_who_is_unknown_after_the_handshake_is_disconnected(narrow: Target, name: str) -> None:
    """In protocols whose handshake identifies: nothing that follows could."""
    peers = {
        "emqp-clients": narrow.emqp,
        "emqp-workers": lambda: narrow.emqp("worker"),
        "micromsg2": narrow.micromsg2,
    }
    with peers[name]() as peer:
        began = time.monotonic()
        peer.until(lambda: False)  # returns at the end of the connection
        assert time.monotonic() - began < 5.0


def open_files(target: Target) -> int:
    return sum(1 for _ in Path(f"/proc/{target.hub.process.pid}/fd").iterdir())


def settled_files(target: Target, most: int) -> int:
    """Open files, when the hub has closed what it closes at once."""
    deadline = time.monotonic() + 5.0
    while (count := open_files(target)) > most and time.monotonic() < deadline:
        time.sleep(0.02)
    return count


def test_peers_that_are_turned_away_hold_no_files(narrow: Target) -> None:
    """They have no slot, but would keep their sockets open: for a tenth of the connections, or 16,
    the hub waits until they have read its goodbye."""
    before = open_files(narrow)
    with ExitStack() as stack:
        for _ in range(400):
            idle(stack, narrow.port("emp"))
        most = before + 10 + 16 + 10
        assert settled_files(narrow, most) <= most
        with narrow.emp(TOKEN):
            assert get(narrow, "/healthz")


@pytest.mark.parametrize("name", ["emp-tls", "https"])
def test_handshakes_that_do_not_begin_hold_no_files(
    tmp_path: Path, tls: TlsPair, name: str
) -> None:
    files = f"[tls]\ncertificate = '{tls.certificate}'\nkey = '{tls.key}'\n"
    addresses = "[listen]\nemp-tls = '127.0.0.1:0'\nhttps = '127.0.0.1:0'\n" + "".join(
        f"{each}-tls = 'off'\n" for each in ("relink", "epoxy", "micromsg2")
    )
    with running(tmp_path, addresses + files + SETTINGS, TOKEN) as target, ExitStack() as stack:
        before = open_files(target)
        silent = [idle(stack, target.port(name)) for _ in range(400)]
        most = before + 16 + 10
        assert settled_files(target, most) <= most
        # The newest are waited for: one that begins now gets in.
        context = ssl.create_default_context(cafile=tls.certificate)
        with context.wrap_socket(silent[-1], server_hostname="localhost") as secure:
            assert secure.version() is not None


def test_wrong_tokens_over_http_hold_no_connections(narrow: Target) -> None:
    """Their answers are delayed, by seconds after some failures."""
    request = "GET /v1/state HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer wrong{}\r\n\r\n"
    with ExitStack() as stack:
        for number in range(60):
            idle(stack, narrow.port("http")).sendall(request.format(number).encode())
        time.sleep(0.2)  # for them to be read: whoever is not yet makes room anyway
        for _ in range(3):
            assert get(narrow, "/healthz")
            assert get(narrow, "/v1/state", ADMIN)


OTHER = "the-secret-of-anna"


def test_one_user_does_not_hold_all_connections(tmp_path: Path) -> None:
    """The last quarter is for users with less than a quarter."""
    settings = f"""
        [connections]
        connections = 40
        {USERS}
        [[users]]
        name = "anna"
        token = "{OTHER}"
        produce = ["queue/anna"]
    """
    with running(tmp_path, settings, TOKEN) as target, ExitStack() as stack:
        refused = 0
        for _ in range(40):
            peer = Attacker(target.port("emp"), EmpConnection("client", 0.0)).opened()
            stack.enter_context(peer)
            peer.events.clear()
            peer.connection.send_request("$authenticate", b'{"token":"%b"}' % TOKEN.encode())
            peer.until(lambda peer=peer: bool(peer.events))
            # The hub's error may follow the answer.
            peer.connection.send_request("$echo", b"{}") if not peer.connection.closed else None
            peer.until(lambda peer=peer: len(peer.events) > 1)
            refused += peer.connection.closed
        assert refused == 10
        for _ in range(5):
            stack.enter_context(target.emp(OTHER))
