"""What a lake has when everything is over: each row of the ledger and each message once, or a gap
that names it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from crosswire.hub.ledger import Step
from crosswire.lake.files import find
from crosswire.testing.simulation.durable import MessageKey, find_messages

__all__ = ["LakeContent", "LedgerEntry", "read_lake"]

_STEPS = {step.name.lower().replace("_", "-"): step for step in Step}


class LedgerEntry(NamedTuple):
    """A row of the ledger, as far as it is audited."""

    seq: int
    id: int
    step: Step
    destination: str


class LakeContent(NamedTuple):
    """What files have, and which rows will never be in one."""

    ledger: list[LedgerEntry]
    messages: Counter[MessageKey]
    ids: Counter[int]
    missing_rows: set[int]
    missing_ids: list[tuple[int, int]]


def read_lake(folder: Path) -> LakeContent:
    """Read all of it."""
    content = LakeContent([], Counter(), Counter(), set(), [])
    for file in find(folder, ("ledger", "messages", "gaps")):
        table = pq.read_table(file.path, partitioning=None)
        if file.table == "ledger":
            names = ("seq", "id", "step", "destination")
            for seq, identifier, step, destination in zip(
                *(table[name].to_pylist() for name in names), strict=True
            ):
                content.ledger.append(LedgerEntry(seq, identifier, _STEPS[step], destination))
        elif file.table == "messages":
            content.ids.update(table["id"].to_pylist())
            for destination, payload in zip(
                table["destination"].to_pylist(), table["payload"].to_pylist(), strict=True
            ):
                # Dead letters are messages of their own, with the payload of what died.
                if not destination.endswith("/dead"):
                    content.messages.update(find_messages(payload))
        else:
            for name, first, last in zip(
                *(table[each].to_pylist() for each in ("table", "first", "last")), strict=True
            ):
                if name == "ledger":
                    content.missing_rows.update(range(first, last + 1))
                elif name == "messages":
                    content.missing_ids.append((first, last))
    return content
