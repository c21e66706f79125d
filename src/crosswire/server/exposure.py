"""What a configuration exposes to other machines or users: refused, or a warning on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from crosswire.config import Config
from crosswire.errors import ConfigError

__all__ = ["Exposure", "find_exposures", "readable_by_others", "refuse_exposures"]

_TOKEN_LISTENERS: Final = ("emp", "epoxy", "http", "micromsg2")
"""Listeners without TLS on which peers may send a token."""


class Exposure(msgspec.Struct, frozen=True):
    """A risk of a configuration. `path` is its key, () for the file itself."""

    path: tuple[str | int, ...]
    what: str
    hint: str
    is_refused: bool
    """Whether `serve` does not start with it; else it is a warning."""


def readable_by_others(file: Path) -> bool:
    """Whether group or others may read this file; False if there is none."""
    return _has_mode(file, 0o044)


def _writable_by_others(file: Path) -> bool:
    return _has_mode(file, 0o022)


def _has_mode(file: Path, mode: int) -> bool:
    try:
        return bool(file.stat().st_mode & mode)
    except OSError:
        return False


def find_exposures(config: Config, file: Path | None = None) -> Iterator[Exposure]:
    """What is exposed, by the settings and by the rights of the file they are from.

    With `insecure` nothing is refused. Raises ConfigError for an address that can't be parsed.
    """
    addresses = config.addresses()
    remote = {name: each for name, each in addresses.items() if not each.is_loopback}
    for name, address in config.exposed().items():
        yield Exposure(
            ("listen", name),
            f"on {address} anyone who can connect would have all rights",
            "configure [[users]], or start with --insecure",
            is_refused=True,
        )
    has_tokens = any(user.has_token for user in config.users)
    # A hash is none, and a token from elsewhere is not in the file.
    has_secrets = config.emqp.curve_secret_key is not None or any(
        user.token is not None and user.token_file is None and user.token_env is None
        for user in config.users
    )
    if file is not None and has_secrets and readable_by_others(file):
        yield Exposure(
            (),
            "it has tokens or keys, and other users of this machine may read it",
            f"chmod 600 {file}, or start with --insecure",
            is_refused=bool(remote) and not config.insecure,
        )
    if file is not None and _writable_by_others(file):
        yield Exposure(
            (),
            "other users of this machine may change it, and give themselves all rights",
            f"chmod go-w {file}, or start with --insecure",
            is_refused=bool(remote) and not config.insecure,
        )
    if config.tls is not None and readable_by_others(Path(config.tls.key)):
        yield Exposure(
            ("tls", "key"),
            f"other users of this machine may read {config.tls.key}",
            f"chmod 600 {config.tls.key}, or start with --insecure",
            is_refused=bool(remote) and not config.insecure,
        )
    for number, user in enumerate(config.users):
        if user.token_file is not None and readable_by_others(Path(user.token_file)):
            yield Exposure(
                ("users", number, "token_file"),
                f"other users of this machine may read {user.token_file}",
                f"chmod 600 {user.token_file}, or start with --insecure",
                is_refused=bool(remote) and not config.insecure,
            )
    if not has_tokens:
        return
    plain = [name for name in _TOKEN_LISTENERS if name in addresses]
    for name in plain:
        if name in remote:
            yield Exposure(
                ("listen", name),
                f"on {remote[name]} tokens would be sent without encryption",
                "use a listener with TLS, or start with --insecure",
                is_refused=not config.insecure,
            )
    local = [name for name in plain if name not in remote]
    if local:
        yield Exposure(
            ("listen",),
            f"tokens are sent without encryption, on loopback only: {', '.join(local)}",
            "programs of this machine's administrator can record them",
            is_refused=False,
        )


def refuse_exposures(config: Config, file: Path | None = None) -> list[Exposure]:
    """The warnings. Raises ConfigError for the first exposure that is refused."""
    found = list(find_exposures(config, file))
    for each in found:
        if each.is_refused:
            where = str(each.path[-1]) if each.path else str(file)
            raise ConfigError(f"{where}: {each.what} ({each.hint})")
    return found
