"""The results file: one line of JSON for each part of a campaign that was run."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["RESULTS", "CampaignPart", "append", "read", "source_commit"]

RESULTS: Final = Path(__file__).with_name("results.jsonl")


class CampaignPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one part showed, from `seed` on.

    `lost` was acknowledged and is gone; `returned` was settled for sure and came back; `wrong` is
    not what was sent, or not counted as it should be. `unavailable_s` is how long nobody was
    served. `details` differ from campaign to campaign.

    Whoever fixes what a part showed adds `fixed` to its line, by hand, with what was fixed. Its
    figures stay as they are, and it is run again: that part has `again`, and the same seed.
    """

    campaign: str
    date: str
    version: str
    commit: str = ""
    """Of the sources; unknown outside of a checkout."""
    seed: int
    again: bool = False
    rounds: int
    seconds: float
    attempted: int = 0
    acknowledged: int = 0
    lost: int = 0
    returned: int = 0
    wrong: int = 0
    unavailable_s: float = 0.0
    details: dict[str, int | float | str] = {}
    fixed: str = ""

    @property
    def kept_promise(self) -> bool:
        """Whether nothing was lost, returned or wrong."""
        return not (self.lost or self.returned or self.wrong)

    def __str__(self) -> str:
        names = ("rounds", "attempted", "acknowledged", "lost", "returned", "wrong")
        counts = ", ".join(f"{name} {getattr(self, name):,}" for name in names)
        more = "".join(f", {name} {value}" for name, value in self.details.items())
        return (
            f"{self.campaign}: {counts}, unavailable {self.unavailable_s:.1f} s{more}"
            f" ({self.seconds:.0f} s)"
        )


def append(part: CampaignPart, path: Path = RESULTS) -> None:
    """Write it down at once: a run that is ended loses only the part that it was in."""
    with path.open("ab") as file:
        # Runs of two campaigns may append at a time: a line is one write.
        file.write(msgspec.json.encode(part) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path = RESULTS) -> list[CampaignPart]:
    """All parts so far."""
    if not path.exists():
        return []
    decode = msgspec.json.Decoder(CampaignPart).decode
    return [decode(line) for line in path.read_bytes().splitlines()]


@cache
def source_commit() -> str:
    """The commit of these sources, with a + if the product was changed since; "" if unknown."""
    folder = Path(__file__).parents[2]
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True)
        changed = subprocess.run(
            [*git, "diff", "--quiet", "HEAD", "--", "src"], capture_output=True
        )
    except OSError:
        return ""
    if head.returncode:
        return ""
    return head.stdout.decode().strip() + ("+" if changed.returncode else "")
