"""Contexts: hubs by name, with their addresses and credentials, in a file of the user's own."""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from crosswire.errors import ConfigError

__all__ = [
    "DEFAULT_HOST",
    "DEFAULT_HUB",
    "KnownHub",
    "KnownHubs",
    "contexts_file",
    "fill_in",
    "load_hubs",
    "save_hubs",
]

DEFAULT_HUB: Final = "http://127.0.0.1:7380"
DEFAULT_HOST: Final = "127.0.0.1"
_DEFAULT_VIA: Final = "emp"
_VERSION: Final = 1
_OTHERS: Final = 0o077
_FROM_ENVIRONMENT: Final = {
    "hub": "CROSSWIRE_HUB",
    "token": "CROSSWIRE_TOKEN",
    "curve_secret": "CROSSWIRE_CURVE_SECRET",
}
_DEFAULTS: Final = {"hub": DEFAULT_HUB, "host": DEFAULT_HOST, "via": _DEFAULT_VIA}


class KnownHub(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A context. `hub` is the URL of its HTTP listener; `via` the protocol that `port` is for."""

    hub: str | None = None
    token: str | None = None
    via: str | None = None
    host: str | None = None
    port: int | None = None
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    curve_server: str | None = None
    curve_secret: str | None = None

    def public(self) -> dict[str, Any]:
        """Its settings; of its secrets only whether they are there."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("token", "curve_secret"):
            if name in shown:
                shown[name] = True
        return shown


class KnownHubs(msgspec.Struct, kw_only=True):
    """All contexts; `current` is the name of the one that is used by default, if any."""

    version: int = _VERSION
    current: str = ""
    contexts: dict[str, KnownHub] = {}


def contexts_file() -> Path:
    """Where contexts are: $CROSSWIRE_CONTEXTS, else crosswire/contexts.json in the folder for
    settings."""
    given = os.environ.get("CROSSWIRE_CONTEXTS")
    if given:
        return Path(given)
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "crosswire" / "contexts.json"


def load_hubs() -> KnownHubs:
    """The contexts, none without a file. Raises ConfigError.

    A file that other users may read is refused: it has tokens.
    """
    path = contexts_file()
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS:
                raise ConfigError(f"other users may read or change {path}: chmod 600 {path}")
            hubs = msgspec.json.decode(file.read(), type=KnownHubs)
    except FileNotFoundError:
        return KnownHubs()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no file of contexts: {error}") from None
    if hubs.version != _VERSION:
        raise ConfigError(f"{path} was written by another version of Crosswire")
    return hubs


def save_hubs(hubs: KnownHubs) -> None:
    """Write the contexts, readable by their user only. Raises ConfigError."""
    path = contexts_file()
    unfinished = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)
        # Never readable by others, not even for a moment: so not created first and changed then.
        mode = stat.S_IRUSR | stat.S_IWUSR
        with os.fdopen(
            os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb"
        ) as out:
            out.write(msgspec.json.format(msgspec.json.encode(hubs)) + b"\n")
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}") from None


def fill_in(options: argparse.Namespace) -> None:
    """Set what the options of a command leave open: from the context in use, then from the
    environment, then to the defaults. Raises ConfigError.

    A context is used as a whole or not at all: its token goes to its hub only.
    """
    if not hasattr(options, "context"):
        return
    hub = _context_of(options)
    given = vars(options)
    for name in KnownHub.__struct_fields__:
        if name in given and given[name] in (None, False):
            given[name] = _value(name, hub, given)


def _context_of(options: argparse.Namespace) -> KnownHub | None:
    name = options.context
    if name is None:
        if getattr(options, "hub", None) or getattr(options, "host", None):
            return None
        name = os.environ.get("CROSSWIRE_CONTEXT")
        if not name and os.environ.get("CROSSWIRE_HUB"):
            return None
    hubs = load_hubs()
    name = name or hubs.current
    if not name:
        return None
    if name not in hubs.contexts:
        known = ", ".join(sorted(hubs.contexts)) or "none"
        raise ConfigError(f"there is no context {name!r}; there are: {known}")
    return hubs.contexts[name]


def _value(name: str, hub: KnownHub | None, given: dict[str, Any]) -> Any:
    if hub is not None:
        value = getattr(hub, name)
        if name == "host" and value is None and hub.hub is not None:
            value = urlsplit(hub.hub if "//" in hub.hub else f"//{hub.hub}").hostname
        if name == "port" and given.get("via") != (hub.via or _DEFAULT_VIA):
            # It is the port of another protocol's listener.
            value = None
        if value is not None and value is not False:
            return value
    variable = _FROM_ENVIRONMENT.get(name)
    if variable is not None and os.environ.get(variable):
        return os.environ[variable]
    return _DEFAULTS.get(name, given[name])
