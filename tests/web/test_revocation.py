"""Streams end with the right to what they read."""

from __future__ import annotations

import msgspec
import pytest

from crosswire.access import User
from crosswire.errors import Forbidden
from crosswire.web.contract import Chunks, OperationRequest
from crosswire.web.log import _while_allowed
from crosswire.web.replays import Replays
from tests.web.conftest import StartWeb

ANNA = User(name="anna", token="a-secret-of-anna", consume=("queue/q",))
POORER = User(name="anna", token="a-secret-of-anna", consume=("queue/r",))
RICHER = User(name="anna", token="a-secret-of-anna", consume=("queue/#",))


async def test_a_stream_of_the_log_is_cut_off(start_web: StartWeb) -> None:
    server = (await start_web(users=(ANNA,))).server
    closed = False

    async def chunks() -> Chunks:
        nonlocal closed
        try:
            for number in range(9):
                yield b"%d" % number
        finally:
            closed = True

    ask = OperationRequest(server, Replays(), principal="anna", path={}, query=None, body=None)
    stream = _while_allowed(ask, ["queue/q"], chunks())
    assert await anext(stream) == b"0"
    server.reload(msgspec.structs.replace(server.config, users=(RICHER,)))
    assert await anext(stream) == b"1"
    server.reload(msgspec.structs.replace(server.config, users=(POORER,)))
    with pytest.raises(Forbidden):
        await anext(stream)
    assert closed
