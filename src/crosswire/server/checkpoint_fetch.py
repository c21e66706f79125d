"""Fetches a checkpoint of another replica: for one that is new, was away for too long, or is
damaged.

The files arrive beside the store, are compared with the leader's checksums, and become the store
when the caller has verified their position against the log. Everything here is called on a thread.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec

from crosswire.commitlog.records import RecordPosition
from crosswire.config import Config
from crosswire.durable_files import replace_file, sync_folder
from crosswire.errors import ConfigError, ConnectFailed, RequestFailed, StoreDamaged, StoreFailed
from crosswire.listeners import is_loopback
from crosswire.server.private_files import create_private_files
from crosswire.store.checkpoint import CheckpointFile, is_plain_name
from crosswire.store.rocks import COPIES, DAMAGES, MARK, REPLICA
from crosswire.store.rocks_replica import ReplicaFile, RocksReplica

__all__ = ["CheckpointFetch"]

_TIMEOUT_S: Final = 30.0
_LOOK_S: Final = 0.2
_ATTEMPTS: Final = 20
_CHUNK_BYTES: Final = 1 << 20
_OF_A_HUB_ALONE: Final = (COPIES, MARK, DAMAGES)
"""Files that a replica does not have."""
_ARRIVING: Final = "store.arriving"
_REPLACED: Final = "store.replaced"


class _Made(msgspec.Struct):
    id: str
    state: str
    error: str = ""
    files: tuple[CheckpointFile, ...] = ()


class CheckpointFetch:
    """Fetches from other replicas, with this one's own credentials."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._data = Path(config.data)
        self._arriving = self._data / _ARRIVING

    def fetch(self, address: str, log_id: bytes) -> RecordPosition:
        """Have the replica at this address make a checkpoint, and fetch it; returns how far it is.

        Raises ConfigError, ClientError, StoreError; what has arrived is removed then.
        """
        api = _Remote(address, self._token(), is_open=self._config.insecure)
        create_private_files()
        shutil.rmtree(self._arriving, ignore_errors=True)
        try:
            self._arriving.mkdir(parents=True)
            made = api.make()
            try:
                for each in made.files:
                    if not is_plain_name(each.name):
                        raise StoreDamaged(f"{each.name!r} is no name of a store's file")
                    path = f"/v1/checkpoints/{made.id}/files/store/{quote(each.name)}"
                    _receive(api, path, self._arriving / each.name, each.size_bytes, each.sha256)
            finally:
                with suppress(ConnectFailed, RequestFailed):
                    api.remove(made.id)
            return self._complete(log_id)
        except OSError as error:
            shutil.rmtree(self._arriving, ignore_errors=True)
            raise StoreFailed(f"{error.filename}: {error.strerror}") from error
        except BaseException:
            shutil.rmtree(self._arriving, ignore_errors=True)
            raise

    def _token(self) -> str | None:
        file = self._config.replication.token_file
        if file is None:
            return None
        try:
            return Path(file).read_text().partition("\n")[0].strip()
        except OSError as error:
            raise ConfigError(f"can't read {file}: {error.strerror}") from error

    def _complete(self, log_id: bytes) -> RecordPosition:
        """Make it this replica's own. Raises StoreError."""
        for name in _OF_A_HUB_ALONE:
            (self._arriving / name).unlink(missing_ok=True)
        mark = ReplicaFile(log_id.hex(), self._config.replication.replica)
        replace_file(self._arriving / REPLICA, msgspec.json.encode(mark))
        store = RocksReplica(self._arriving, self._config.store)
        try:
            if store.log_id != log_id:
                raise StoreFailed(
                    f"the checkpoint belongs to the log {store.log_id.hex()}, this replica to"
                    f" {log_id.hex()}"
                )
            if store.fault:
                raise StoreDamaged(f"the checkpoint is damaged: {store.fault}")
            store.clear_local()
            return store.position
        finally:
            store.close()

    def install(self) -> None:
        """Make what has arrived the store of this data directory, which is not open. Raises
        StoreFailed.

        The old one is kept beside it until the next time: it may be the only trace of a damage.
        """
        store, replaced = self._data / "store", self._data / _REPLACED
        try:
            shutil.rmtree(replaced, ignore_errors=True)
            if store.exists():
                store.rename(replaced)
            self._arriving.rename(store)
            sync_folder(self._data)
        except OSError as error:
            raise StoreFailed(f"{error.filename}: {error.strerror}") from error


def _receive(api: _Remote, path: str, target: Path, size_bytes: int, sha256: str) -> None:
    """Fetch a file, and continue where a connection ended. Raises OSError, ClientError,
    StoreDamaged."""
    digest, received = hashlib.sha256(), 0
    with target.open("xb") as out:
        for attempt in range(_ATTEMPTS):
            try:
                for chunk in api.read(f"{path}?offset={received}"):
                    received += len(chunk)
                    if received > size_bytes:
                        raise StoreDamaged(f"{target.name} is longer than it was listed")
                    digest.update(chunk)
                    out.write(chunk)
            except ConnectFailed:
                if attempt + 1 == _ATTEMPTS:
                    raise
                time.sleep(_LOOK_S)
            if received == size_bytes:
                break
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != sha256:
        raise StoreDamaged(f"{target.name} did not arrive as it was sent: its checksum differs")


class _Remote:
    """Another replica's API. Payloads of all messages travel: never in the clear between machines,
    unless everything does (`insecure`)."""

    def __init__(self, address: str, token: str | None, *, is_open: bool) -> None:
        parts = urlsplit(address)
        host = parts.hostname or ""
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{address!r}, where a replica can be reached, is no URL of a hub")
        if parts.scheme == "http" and not is_loopback(host) and not is_open:
            raise ConfigError(
                f"{address} has no TLS: a checkpoint has all messages, so it is fetched from"
                ' https:// only. Set "advertise" of that replica to its https listener'
            )
        self._parts = parts
        self._address = address
        self._headers = {"accept": "application/json", "content-type": "application/json"}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)

    def make(self) -> _Made:
        """A checkpoint that is ready. Raises ClientError, StoreFailed."""
        made = self.ask("POST", "/v1/checkpoints", b"{}")
        while made.state == "running":
            time.sleep(_LOOK_S)
            made = self.ask("GET", f"/v1/checkpoints/{made.id}")
        if made.state != "ready":
            raise StoreFailed(f"{self._address} could not make a checkpoint: {made.error}")
        return made

    def ask(self, method: str, path: str, body: bytes | None = None) -> _Made:
        """A response about a checkpoint. Raises ConnectFailed, RequestFailed."""
        answer = b"".join(self.read(path, method, body))
        try:
            return msgspec.json.decode(answer, type=_Made)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestFailed("unexpected", f"{self._address} is no replica: {error}") from None

    def remove(self, identifier: str) -> None:
        """It is not needed any more. Raises ConnectFailed, RequestFailed."""
        for _ in self.read(f"/v1/checkpoints/{identifier}", "DELETE"):
            pass

    def read(self, path: str, method: str = "GET", body: bytes | None = None) -> Iterator[bytes]:
        """The body of a response, as it comes. Raises ConnectFailed, RequestFailed."""
        connection = self._connect()
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                text = response.read(_CHUNK_BYTES).decode(errors="replace")
                raise RequestFailed(str(response.status), f"{self._address}: {text}")
            while chunk := response.read(_CHUNK_BYTES):
                yield chunk
        except (OSError, http.client.HTTPException) as error:
            raise ConnectFailed(f"no response from {self._address}: {error}") from None
        finally:
            connection.close()
