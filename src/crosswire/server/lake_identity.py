"""Which lake replicas share: a file in its folder, and the same name in the replicated store.

A leader that wrote its files to a folder of its own would leave gaps in the lake of all others, so
a replica that does not find the lake of its log does not start, and does not lead.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from crosswire.durable_files import make_folder, replace_file
from crosswire.errors import ConfigError
from crosswire.store.contract import Store
from crosswire.store.keys import state_key

__all__ = ["LAKE_IDENTITY", "check_lake", "claim_lake"]

_FILE: Final = "crosswire-lake.id"
_SPACE: Final = "lake"
_KEY: Final = b"identity"
LAKE_IDENTITY: Final = state_key(_SPACE, _KEY)
"""Where a store has it."""


def check_lake(store: Store, lake: Path) -> None:
    """Raises ConfigError if the folder is not the lake of the log. One that no leader has claimed
    yet is."""
    known = store.get(_SPACE, _KEY)
    if known is None:
        return
    try:
        found = (lake / _FILE).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the lake of this hub's replicas is not in {lake}: {_FILE} can't be read there"
            f" ({error.strerror}). Set lake.directory to the folder that they share, and mount it"
        ) from error
    if found != known:
        raise ConfigError(
            f"the lake in {lake} is not the one that this hub's replicas share: set lake.directory"
            " to the same folder on all of them"
        )


def claim_lake(store: Store, lake: Path) -> None:
    """Make the folder the lake of the log, if that has none; it is in the open group then.

    Raises ConfigError, OSError.
    """
    check_lake(store, lake)
    if store.get(_SPACE, _KEY) is None:
        identity = secrets.token_hex(16).encode()
        make_folder(lake)
        replace_file(lake / _FILE, identity)
        store.save(_SPACE, _KEY, identity)
