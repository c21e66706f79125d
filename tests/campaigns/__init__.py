"""Campaigns against real hubs, whose results are published: `python -m tests.campaigns NAME`.

Each is run in parts. A part appends one line to `results.jsonl`, from which
`python -m tests.campaigns.page` makes the tables of docs/reliability.md: what is there was run.
"""
