"""The configuration that is in effect, without secrets, and what of it waits for a restart."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from crosswire.config import Config
from crosswire.web.contract import Operation, OperationRequest

__all__ = ["CONFIGURATION_OPERATIONS"]

_SECRETS: Final = frozenset({"token", "token_hash", "curve_secret_key"})
_HIDDEN: Final = "(hidden)"
_USER_OF_URL: Final = re.compile("://[^/@]*@")


class WaitingSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that was changed in the file, and takes effect after a restart."""

    name: str
    """Such as `store.buffer_bytes`."""
    effective: Any
    """The value that holds now."""
    configured: Any
    """The value that holds after a restart."""


class EffectiveConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, by their names in the file."""

    effective: dict[str, Any]
    """What holds now, defaults included. Secrets are replaced by `(hidden)`."""
    waiting: list[WaitingSetting]
    """What was changed since the start, and needs a restart."""


def show_configuration(ask: OperationRequest) -> EffectiveConfiguration:
    """The effective settings, and those that wait for a restart."""
    server = ask.server
    effective, configured = _plain(server.config), _plain(server.configured)
    waiting = [
        WaitingSetting(name=name, effective=before, configured=after)
        for section in server.waiting_for_restart
        for name, before, after in _differences(
            section, effective.get(section), configured.get(section)
        )
    ]
    return EffectiveConfiguration(effective=effective, waiting=waiting)


def _plain(config: Config) -> dict[str, Any]:
    plain: dict[str, Any] = _hide(msgspec.to_builtins(config))
    return plain


def _hide(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _HIDDEN if name in _SECRETS and each is not None else _hide(each)
            for name, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_hide(each) for each in value]
    if isinstance(value, str) and "://" in value:
        return _USER_OF_URL.sub(f"://{_HIDDEN}@", value).partition("?")[0]
    return value


def _differences(name: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    """Settings that differ, by their dotted names."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            found
            for key in sorted(before.keys() | after.keys())
            for found in _differences(f"{name}.{key}", before.get(key), after.get(key))
        ]
    return [] if before == after else [(name, before, after)]


CONFIGURATION_OPERATIONS: Final = (
    Operation(
        name="show_configuration",
        tag="hub",
        method="GET",
        path="/v1/configuration",
        summary="The effective configuration without secrets, and what waits for a restart",
        handler=show_configuration,
        answer=EffectiveConfiguration,
        on_standby=True,
    ),
)
