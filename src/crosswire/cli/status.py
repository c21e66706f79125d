"""Show how a hub is: ready or not, its traffic, backlog, peers, disk and troubles.

The exit code is 0 if the hub is ready, 1 if it is not, or does not answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from crosswire.cli.hub import Api, add_hub_options, api_of, duration, print_json, rate, size
from crosswire.cli.parsers import add_examples
from crosswire.cli.table import harmless, print_row
from crosswire.errors import RequestFailed
from crosswire.plurals import plural

__all__ = ["configure", "run", "troubles_of"]

_WIDTHS = (10, 0)


def configure(parser: argparse.ArgumentParser, _argv: Sequence[str]) -> None:
    """Add the command's options and arguments."""
    add_hub_options(parser)
    add_examples(parser, "crosswire status", "crosswire status --context live --json")


def run(options: argparse.Namespace) -> int:
    """Print the state; 1 if the hub is not ready. Raises ClientError."""
    api = api_of(options)
    ready = api.readiness()
    state = _state(api)
    disk = None if state is None else _disk(api)
    is_ready = ready["status"] in ("ready", "damaged")
    if options.json:
        print_json({"ready": ready, "state": state, "disk": disk})
        return 0 if is_ready else 1
    reasons = f": {'; '.join(map(harmless, ready['reasons']))}" if ready["reasons"] else ""
    print_row(("hub", f"{ready['status']}{reasons}"), _WIDTHS)
    if state is not None:
        for row in _facts(state, disk):
            print_row(row, _WIDTHS)
    for index, text in enumerate(troubles_of(ready, state)):
        print_row(("" if index else "troubles", harmless(text)), _WIDTHS)
    return 0 if is_ready else 1


def _state(api: Api) -> dict[str, Any] | None:
    """None while the hub starts, and on a standby without data. Raises RequestFailed without the
    right."""
    try:
        state: dict[str, Any] = api.get("/v1/state")
    except RequestFailed as error:
        if error.code in ("unauthenticated", "forbidden"):
            raise
        return None
    return state


def _disk(api: Api) -> dict[str, Any] | None:
    try:
        disk: dict[str, Any] = api.get("/v1/disk")
    except RequestFailed:
        # Busy, or starting: the rest is worth showing.
        return None
    return disk


def _facts(state: dict[str, Any], disk: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    yield (
        "node",
        f"{state['node']}, version {state['version']}, up {duration(state['uptime_s'])}",
    )
    if state["leader"]:
        where = f" at {harmless(state['leader_address'])}" if state["leader_address"] else ""
        lag = f", a lag of {plural(state['lag'], 'record')}" if state["lag"] else ""
        yield (
            "replica",
            f"{state['role']}; {harmless(state['leader'])}{where} leads; record "
            f"{state['applied']:,} applied{lag}",
        )
    yield (
        "traffic",
        f"{_per_second(state['accepted_per_s'])} accepted, "
        f"{_per_second(state['delivered_per_s'])} delivered, "
        f"{_per_second(state['settled_per_s'])} settled",
    )
    yield (
        "backlog",
        f"{plural(state['messages'], 'message')} in {plural(state['queues'], 'queue')}, "
        f"{plural(state['dead_letters'], 'dead letter')}",
    )
    connections = state["connections"]
    kinds = ", ".join(f"{name} {count:,}" for name, count in sorted(connections.items()))
    yield (
        "peers",
        f"{plural(sum(connections.values()), 'connection')}{f' ({kinds})' if kinds else ''} of at "
        f"most {state['connections_limit']:,}, {plural(state['services'], 'service')}",
    )
    yield (
        "names",
        f"{plural(state['topics'], 'topic')}, {plural(state['subscriptions'], 'subscription')}, "
        f"{plural(state['schedules'], 'schedule')}",
    )
    yield (
        "memory",
        f"{size(state['memory_bytes'])} of {size(state['memory_limit_bytes'])} for peers",
    )
    if disk is not None:
        lake = "no lake" if disk["lake"] is None else f"lake {size(disk['lake']['size_bytes'])}"
        yield (
            "disk",
            f"store {size(disk['store']['size_bytes'])}, {lake}, "
            f"{size(disk['store']['free_bytes'])} free",
        )
    addresses = ", ".join(f"{name} {each}" for name, each in sorted(state["listen"].items()))
    yield "listen", addresses


def _per_second(value: float) -> str:
    return f"{rate(value) if value else '0'}/s"


def troubles_of(ready: dict[str, Any], state: dict[str, Any] | None) -> list[str]:
    """What an operator should look at, a text each."""
    found = list(ready.get("notes", ()))
    if state is None:
        return found
    if state["open"] and any(not _is_local(each) for each in state["listen"].values()):
        found.append("no users are configured, and others than this machine can connect")
    if state["store"]["error"]:
        found.append(f"the last write failed: {state['store']['error']}")
    found += [f"damaged: {each}" for each in state["damage"]]
    found += [f"stopped: {each}" for each in state["stopped"]]
    if state["waiting_for_restart"]:
        found.append(f"settings that wait for a restart: {', '.join(state['waiting_for_restart'])}")
    found += state["reports"]
    return found


def _is_local(address: str) -> bool:
    from crosswire.listeners import is_loopback

    host = address.rpartition(":")[0]
    return is_loopback(host.removeprefix("[").removesuffix("]"))
