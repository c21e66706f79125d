"""Texts of errors for peers: none names a file of the server."""

from __future__ import annotations

import pytest

from crosswire.error_texts import public_text
from crosswire.errors import (
    CrosswireError,
    Forbidden,
    LakeError,
    LogUnavailable,
    RecordUnreadable,
    StoreDamaged,
    StoreFailed,
    StoreFull,
)
from crosswire.gateways.emqp.messages import failure_of_call
from crosswire.gateways.epoxy.messages import text_of
from crosswire.gateways.failures import for_peers, to_failure
from crosswire.web.contract import failure_of

PATH = "/var/lib/crosswire/store/000012.sst"


@pytest.mark.parametrize(
    "kind", [LakeError, LogUnavailable, RecordUnreadable, StoreDamaged, StoreFailed, StoreFull]
)
def test_files_of_the_server_are_for_operators(kind: type[CrosswireError]) -> None:
    error = kind(f"Corruption: a block of {PATH}")
    shown = [
        public_text(error),
        text_of(error),
        str(to_failure(error)),
        failure_of_call(error, 1).decode(),
        failure_of(error)[1].description,
    ]
    assert not any("crosswire/store" in each for each in shown)
    assert PATH in failure_of(error, is_administrator=True)[1].description


def test_a_connection_ends_with_the_same_kind_of_error() -> None:
    ended = for_peers(StoreFailed(f"can't write {PATH}"))
    assert type(ended) is StoreFailed and PATH not in str(ended)
    refused = Forbidden("anna may not produce queue/q")
    assert for_peers(refused) is refused


def test_what_peers_did_is_shown_to_them() -> None:
    assert public_text(Forbidden("anna may not produce queue/q")) == "anna may not produce queue/q"
