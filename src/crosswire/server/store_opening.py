"""Opens the store in a data directory, of a hub alone or of a replica, and the log of that."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Final

from crosswire.commitlog.replicated import EngineLog
from crosswire.config import Config
from crosswire.durable_files import make_folder
from crosswire.errors import ConfigError, StoreDamaged
from crosswire.lake.files import find
from crosswire.logs import log_event
from crosswire.server.private_files import create_private_files, make_private
from crosswire.store.contract import Store
from crosswire.store.reserve import flush_bytes
from crosswire.store.rocks import REPLICA, RocksStore, is_new
from crosswire.store.rocks_replica import RocksReplica

__all__ = ["log_damage", "open_log", "open_replica", "open_store"]

_log = logging.getLogger("crosswire.server")

_STORE_FILES: Final = re.compile(
    r"LOCK|LOG.*|IDENTITY|MANIFEST-\d+|OPTIONS-\d+(\.dbtmp)?|\d+\.(sst|log|dbtmp)|RESERVE"
    r"|rocksdict-config\.json|crosswire\..*"
)
"""Names of files that a hub may leave when it is killed while it creates its store."""


def open_store(config: Config) -> RocksStore:
    """The store of a hub alone. Raises ConfigError, StoreError."""
    data = Path(config.data)
    path = data / "store"
    needed = flush_bytes(config.store.buffer_bytes)
    if config.store.spare_bytes < needed:
        raise ConfigError(
            f"store.spare_bytes = {config.store.spare_bytes} is less than the {needed} bytes that"
            f" the store's own work may take with buffer_bytes = {config.store.buffer_bytes}"
        )
    if is_new(path) and _has_lake(Path(config.data)):
        raise StoreDamaged(
            f"there is no store in {path}, but a lake beside it: the store is missing. "
            f"`crosswire store repair {config.data}` makes one from the lake; "
            "to start with an empty store, move the lake away"
        )
    try:
        _check_folder(path)
        create_private_files()
        make_folder(path)
        store = RocksStore(path, config.store)
    except OSError as error:
        raise ConfigError(f"can't keep data in {path}: {error.strerror}") from error
    # After it was opened: only then is it known to be a hub's, and not another program's database.
    make_private(data, Path(config.lake.directory) if config.lake.directory else None)
    return store


def open_replica(config: Config, log_id: bytes) -> RocksReplica | None:
    """The store of a replica; None for an empty folder, which with the id of a log becomes one.

    Raises ConfigError, StoreError.
    """
    path = Path(config.data) / "store"
    if is_new(path) and not log_id and not (path / REPLICA).exists():
        return None
    try:
        _check_folder(path)
        create_private_files()
        make_folder(path)
        name = config.replication.replica
        store = RocksReplica(path, config.store, log_id=log_id, name=name)
    except OSError as error:
        raise ConfigError(f"can't keep data in {path}: {error.strerror}") from error
    make_private(Path(config.data))
    return store


def open_log(config: Config) -> EngineLog:
    """The log that the configuration names. Raises ConfigError."""
    try:
        # Only hubs with this log need its client.
        from crosswire.commitlog.postgres.engine import postgres_log
    except ImportError as error:
        raise ConfigError(
            "a log in PostgreSQL needs its client: pip install crosswire[postgresql]"
        ) from error
    settings = config.replication
    return postgres_log(
        settings.log,
        application=f"crosswire {settings.replica}",
        durability=settings.durability,
    )


def _check_folder(path: Path) -> None:
    """Raises ConfigError if the folder is neither a store nor empty, and OSError.

    RocksDB would accept any folder: it creates a store in it, and deletes files with names like
    those of its own.
    """
    for folder in (path.parent, path):
        if folder.is_symlink() and not folder.exists():
            raise ConfigError(
                f"can't keep data in {folder}: it is a link to {folder.readlink()}, which does not"
                " exist"
            )
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"can't keep data in {folder}: it is not a folder")
    if not path.exists():
        return
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        # Raises the system's own error, which distinguishes rights from a read-only disk.
        with tempfile.TemporaryFile(dir=path):
            pass
    if not (path / "CURRENT").exists():
        names = sorted(each.name for each in path.iterdir())
        others = [name for name in names if not _STORE_FILES.fullmatch(name)]
        if others:
            raise ConfigError(
                f"{path} is no store of a hub, but has files of something else"
                f" ({', '.join(others[:3])}): choose another folder for the data"
            )


def _has_lake(data: Path) -> bool:
    try:
        return any(find(data / "lake", ("messages", "ledger")))
    except OSError:
        return False


def log_damage(store: Store) -> None:
    """Log damage of the store: what was found when it was opened, and what will be found."""

    def log(part: str, detail: str) -> None:
        log_event(_log, logging.ERROR, "the store is damaged", part=part, detail=detail)

    for entry in store.damages.entries:
        log(entry.part, entry.detail)
    store.on_damage = log
