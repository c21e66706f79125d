"""The tables of docs/reliability.md, from the results: `python -m tests.campaigns.page`.

What stands between two marks of a table is replaced; the rest of the page is written by hand.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.campaigns.catalogue import CAMPAIGNS
from tests.campaigns.results import CampaignPart, read
from tests.simulation.bugs import BUGS

__all__ = ["PAGE", "render"]

PAGE: Final = Path(__file__).parents[2] / "docs" / "reliability.md"
_NAMES: Final = frozenset(campaign.name for campaign in CAMPAIGNS)
_TABLE: Final = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def render(text: str, parts: Sequence[CampaignPart]) -> str:
    """The page with tables of these results."""
    tables = {"campaigns": _campaigns, "details": _details, "planted": _planted, "fuzz": _fuzz}
    return _TABLE.sub(lambda found: f"{found[1]}\n{tables[found[2]](parts)}\n\n{found[3]}", text)


def _of(parts: Sequence[CampaignPart], name: str) -> list[CampaignPart]:
    return [each for each in parts if each.campaign == name]


def _campaigns(parts: Sequence[CampaignPart]) -> str:
    rows = [
        "| campaign | what | rounds | of | attempted | acknowledged | lost | returned | wrong |"
        " unavailable | commits |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for campaign in CAMPAIGNS:
        own = [each for each in _of(parts, campaign.name) if not each.again]
        sums = [
            sum(getattr(each, name) for each in own)
            for name in ("rounds", "attempted", "acknowledged", "lost", "returned", "wrong")
        ]
        unavailable = sum(each.unavailable_s for each in own)
        rounds, *others = (f"{each:,}" for each in sums)
        cells = [campaign.name, campaign.about, rounds, f"{campaign.total:,}", *others]
        cells += [f"{unavailable:,.0f} s" if unavailable else "", _commits(own)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, *_failures(parts)])


def _commits(parts: Sequence[CampaignPart]) -> str:
    """The first and the last one that these parts ran on, and how many there are."""
    known = list(dict.fromkeys(each.commit for each in parts if each.commit))
    text = " to ".join(f"`{each}`" for each in dict.fromkeys(known[:1] + known[-1:]))
    if len(known) > 2:
        text += f" ({len(known)})"
    if any(not each.commit for each in parts):
        text = f"not recorded, {text}" if text else "not recorded"
    return text


def _failures(parts: Sequence[CampaignPart]) -> list[str]:
    """What every part found that did not keep the promise, and what has become of it."""
    rows = []
    for part in parts:
        if part.kept_promise or part.campaign not in _NAMES:
            continue
        # Counts are in the table above; texts describe what was seen.
        texts = {key: each for key, each in part.details.items() if isinstance(each, str)}
        seen = "; ".join(f"{key}: {text}" for key, text in texts.items())
        counts = ", ".join(
            f"{name} {getattr(part, name)}"
            for name in ("lost", "returned", "wrong")
            if getattr(part, name)
        )
        later = parts[parts.index(part) + 1 :]
        again = [
            each for each in _of(later, part.campaign) if each.again and each.seed == part.seed
        ]
        outcome = f"fixed: {part.fixed}" if part.fixed else "open"
        if again:
            last = again[-1]
            is_good = "nothing wrong" if last.kept_promise else "wrong again"
            outcome += f"; run again on {last.date} at {_commits([last])}: {is_good}"
        found = f"{counts} ({seen})" if seen else counts
        cells = [part.campaign, str(part.seed), part.date, _commits([part]), found, outcome]
        rows.append(f"| {' | '.join(each.replace('|', '/') for each in cells)} |")
    if not rows:
        return ["", "No part has found anything lost, returned or wrong."]
    header = [
        "| campaign | part | date | commit | found | since then |",
        "|---|---:|---|---|---|---|",
    ]
    return ["", "Parts that found something:", "", *header, *rows]


def _details(parts: Sequence[CampaignPart]) -> str:
    """What the campaigns counted beside that, of their last parts."""
    rows = ["| campaign | date | rounds | what it counted |", "|---|---|---:|---|"]
    for name in ("simulation", "damage", "garbage", "churn", "soak"):
        for part in _of(parts, name)[-3:]:
            found = ", ".join(f"{key} {value}" for key, value in part.details.items())
            rows.append(f"| {name} | {part.date} | {part.rounds:,} | {found} |")
    return "\n".join(rows)


def _fuzz(parts: Sequence[CampaignPart]) -> str:
    totals: dict[str, int] = {}
    for part in _of(parts, "fuzz"):
        for name, count in part.details.items():
            if isinstance(count, int):
                totals[name] = totals.get(name, 0) + count
    rows = ["| decoder | inputs so far |", "|---|---:|"]
    rows += [f"| {name} | {count:,} |" for name, count in sorted(totals.items())]
    return "\n".join(rows)


def _planted(parts: Sequence[CampaignPart]) -> str:
    names = [bug.name for bug in BUGS if not bug.unseen]
    last = {str(part.details["bug"]): part for part in _of(parts, "planted")}
    tried = [last[name] for name in names if name in last]
    caught = [part for part in tried if not part.wrong]
    rows = [
        f"{len(caught)} of the {len(names)} bugs were caught"
        + ("." if len(tried) == len(names) else f"; {len(names) - len(tried)} were not tried yet."),
        "",
        "| bug | caught by | seed |",
        "|---|---|---:|",
    ]
    for part in caught:
        rows.append(f"| {part.details['bug']} | {part.details['violation']} | {part.seed} |")
    missed = [part for part in tried if part.wrong]
    if missed:
        rows += ["", "Not caught:", ""]
        reasons = {bug.name: f"; it would take {bug.unreached}" for bug in BUGS if bug.unreached}
        for part in missed:
            name = str(part.details["bug"])
            rows.append(_item(f"{name} (in {part.rounds} seeds{reasons.get(name, '')})"))
    unseen = [bug for bug in BUGS if bug.unseen]
    if unseen:
        rows += ["", "Planted, and not counted, as they break no promise:", ""]
        rows += [_item(f"{bug.name}: {bug.unseen}") for bug in unseen]
    return "\n".join(rows)


def _item(text: str) -> str:
    """An item of a list, in lines as long as those of the docs."""
    return textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  ")


def main() -> int:
    """Write the page; gives the exit code."""
    PAGE.write_text(render(PAGE.read_text(), read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
