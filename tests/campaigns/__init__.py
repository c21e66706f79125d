"""Campaigns against real hubs, whose results are published: `python -m tests.campaigns NAME`.

Each is run in parts. A part appends one line to `results.jsonl`, from which
`scripts/make_reliability.py` makes the tables of docs/reliability.md: what is there was run.
"""
