"""Run campaigns: all of them, or one.

    python -m tests.campaigns
    python -m tests.campaigns kills --rounds 200 --jobs 2
    python -m tests.campaigns kills --again 7

Rounds that are in the results count: a run goes on where the last one ended. `--again` runs the
part with this seed once more, after a fix. Exit code 1 if something was lost, returned or wrong.
"""

from __future__ import annotations

import argparse
import logging
import sys

from tests.campaigns.catalogue import CAMPAIGNS
from tests.campaigns.runner import CampaignSkipped, run_again, run_campaign


def main(arguments: list[str] | None = None) -> int:
    """Gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [each.name for each in CAMPAIGNS]
    parser.add_argument("name", nargs="?", choices=names, help="default: all")
    parser.add_argument("--rounds", type=int, help="in all, with those in the results")
    parser.add_argument("--seconds", type=float, help="begin no further part after this time")
    parser.add_argument("--jobs", type=int, default=1, help="parts at a time, in processes")
    parser.add_argument("--again", type=int, metavar="SEED", help="of a part in the results")
    options = parser.parse_args(arguments)
    if options.again is not None and options.name is None:
        parser.error("--again needs the name of a campaign")
    # What the programs of a campaign log about a hub that is gone is expected.
    logging.disable(logging.CRITICAL)
    is_good = True
    for campaign in CAMPAIGNS:
        if options.name in (None, campaign.name):
            total = campaign.total if options.rounds is None else options.rounds
            try:
                if options.again is not None:
                    is_good &= run_again(campaign, options.again)
                else:
                    is_good &= run_campaign(
                        campaign, total, jobs=options.jobs, seconds=options.seconds
                    )
            except CampaignSkipped as reason:
                print(f"{campaign.name}: not run: {reason}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
