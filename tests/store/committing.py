"""A commit path over a store, without a hub."""

from __future__ import annotations

from collections.abc import Callable

from crosswire.commitlog.contract import CommitGroup
from crosswire.errors import StoreError
from crosswire.hub.commits import CommitPath, CommitStage
from crosswire.hub.dispatch import DispatchLoop
from crosswire.hub.ledger import Ledger
from crosswire.store.contract import Store


class CommitRecorder:
    """Keeps the outcome of each group, and calls `then`."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.outcomes: list[StoreError | None] = []
        self.then = then

    def committed(self, group: CommitGroup) -> None:
        self.outcomes.append(None)
        self.then()

    def failed(self, group: CommitGroup, error: StoreError) -> None:
        self.outcomes.append(error)
        self.then()


def commit_path(store: Store, *listeners: CommitRecorder) -> CommitPath:
    path = CommitPath(store, Ledger(), DispatchLoop(0.0))
    for listener in listeners:
        path.add_listener(CommitStage.TELEMETRY, listener.committed, listener.failed)
    return path


def commit(store: Store) -> StoreError | None:
    """Commit the open group here and now."""
    return commit_path(store).commit_now()


async def close(store: Store) -> None:
    """Commit what is open, then close."""
    await commit_path(store).close()
