"""Services over HTTP: who serves them, how many calls they get, and how long these take."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from crosswire.errors import UnknownMessage
from crosswire.hub.ledger import Step
from crosswire.hub.services import Provider
from crosswire.server.activity import Activity, merged_percentiles_s
from crosswire.web.connections import find_connection
from crosswire.web.consumers import SHOWN_WITH_ROW, is_own_or_observed
from crosswire.web.contract import Operation, OperationRequest
from crosswire.web.paging import ListQuery, NameQuery, SortKey, page_of
from crosswire.web.turn import Turn

__all__ = ["SERVICE_OPERATIONS"]


class ServicesQuery(NameQuery, frozen=True, kw_only=True):
    """A page of services. By default in order of names; by a number the largest comes first."""

    sort: Literal["name", "calls", "errors", "waiting", "latency"] = "name"
    """By what the list is sorted; `latency` is the 99th percentile."""
    connection: str = ""
    """Only services that this connection provides."""


class ProviderRow(msgspec.Struct, frozen=True, kw_only=True):
    """A connection that serves a service."""

    connection: str
    protocol: str
    principal: str
    calls: int
    """Calls that it got and has not answered, of all services that it serves."""
    free: int
    """How many more it takes."""


class ServiceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A service and the connections that serve it."""

    name: str
    providers: list[ProviderRow]
    """Up to 20 of them; `/v1/providers` lists all. Who may not observe sees its own only."""
    provider_count: int
    """How many there are, or how many of one's own."""
    calls: int
    """Calls in progress."""
    waiting: int
    """Those of them that wait until a provider takes them."""
    calls_per_s: float
    """Calls that ended, per second."""
    errors_per_s: float
    """Calls that failed, per second: timeouts, lost providers, and those without one."""
    answered: int
    """Calls that were answered since they are counted."""
    failed: int
    """Calls that failed since they are counted."""
    p50_s: float
    """Half of the calls were answered within this time, over the last minute."""
    p99_s: float
    """99 of 100 calls were answered within this time, over the last minute."""


class ServicePage(msgspec.Struct, frozen=True):
    """A page of services that have a provider."""

    services: list[ServiceRow]
    next: str
    """The cursor of the next page; empty after the last."""


async def list_services(ask: OperationRequest) -> ServicePage:
    """A page of services that have a provider: of all for observers, of those that they may call
    or serve for others."""
    query: ServicesQuery = ask.query
    rows = []
    async with ask.work.turn() as turn:
        activities = await _activities(ask, turn)

        def key(row: ServiceRow) -> SortKey:
            return -_sort_value(row, query.sort), row.name

        for destination in _chosen(ask):
            if query.contains in destination.removeprefix("service/") and ask.may_see(destination):
                rows.append(_row(ask, destination, activities.get(destination, [])))
            await turn.pause()
        page, following = await page_of(rows, key, query, turn)
    return ServicePage(page, following)


def _chosen(ask: OperationRequest) -> list[str]:
    query: ServicesQuery = ask.query
    if not query.connection:
        return ask.hub.services.names()
    gateway = find_connection(ask, query.connection)
    return list(dict.fromkeys(name for each in gateway.providers for name in each.names))


async def _activities(ask: OperationRequest, turn: Turn) -> dict[str, list[Activity]]:
    """By service: that of a service includes its methods, which calls name."""
    found: dict[str, list[Activity]] = {}
    by_name = ask.server.metrics.destinations.by_name
    for destination in list(by_name):
        activity = by_name.get(destination)
        if activity is not None and destination.startswith("service/"):
            found.setdefault(destination, []).append(activity)
            service = "/".join(destination.split("/")[:2])
            if service != destination:
                found.setdefault(service, []).append(activity)
        await turn.pause()
    return found


def _row(ask: OperationRequest, destination: str, activities: list[Activity]) -> ServiceRow:
    calls, waiting = ask.hub.services.load(destination)
    now = ask.now()
    windows = [each.latency for each in activities if each.latency is not None]
    p50_s, p99_s = merged_percentiles_s(windows, now, 0.5, 0.99)
    shown = [
        each
        for each in ask.hub.services.of(destination)
        if is_own_or_observed(ask, each.peer.principal)
    ]
    return ServiceRow(
        name=destination.removeprefix("service/"),
        providers=[_provider(each) for each in shown[:SHOWN_WITH_ROW]],
        provider_count=len(shown),
        calls=calls,
        waiting=waiting,
        calls_per_s=round(sum(each.rate(now, *_ENDED) for each in activities), 3),
        errors_per_s=round(sum(each.rate(now, Step.FAILED) for each in activities), 3),
        answered=sum(each.total(Step.ANSWERED) for each in activities),
        failed=sum(each.total(Step.FAILED) for each in activities),
        p50_s=round(p50_s, 6),
        p99_s=round(p99_s, 6),
    )


_ENDED: Final = (Step.ANSWERED, Step.FAILED)


def _sort_value(row: ServiceRow, sort: str) -> float:
    values = {
        "name": 0.0,
        "calls": row.calls_per_s,
        "errors": row.errors_per_s,
        "waiting": row.waiting,
        "latency": row.p99_s,
    }
    return values[sort]


class ProvidersQuery(ListQuery, frozen=True, kw_only=True):
    """A page of the providers of a service, in order of connections."""

    service: str
    """The name of the service."""


class ProviderPage(msgspec.Struct, frozen=True):
    """A page of providers. Who may not observe sees its own."""

    providers: list[ProviderRow]
    next: str
    """The cursor of the next page; empty after the last."""


async def list_providers(ask: OperationRequest) -> ProviderPage:
    """A page of a service's providers. Raises Forbidden and UnknownMessage."""
    query: ProvidersQuery = ask.query
    destination = f"service/{query.service}"
    ask.require_sight(destination)
    providers = ask.hub.services.of(destination)
    if not providers:
        raise UnknownMessage(f"nobody provides the service {query.service!r}")

    def key(provider: Provider) -> SortKey | None:
        if not is_own_or_observed(ask, provider.peer.principal):
            return None
        # One connection may provide a service twice.
        return 0.0, f"{provider.peer.connection}\0{provider.number:020}"

    async with ask.work.turn() as turn:
        page, following = await page_of(providers, key, query, turn)
    return ProviderPage([_provider(each) for each in page], following)


def _provider(provider: Provider) -> ProviderRow:
    return ProviderRow(
        connection=provider.peer.connection,
        protocol=provider.peer.protocol,
        principal=provider.peer.principal,
        calls=len(provider.calls),
        free=max(provider.window.free, 0),
    )


SERVICE_OPERATIONS: Final = (
    Operation(
        name="list_services",
        tag="services",
        method="GET",
        path="/v1/services",
        summary="Services with their providers, calls, errors and latencies",
        handler=list_services,
        query=ServicesQuery,
        answer=ServicePage,
        needs="principal",
    ),
    Operation(
        name="list_providers",
        tag="services",
        method="GET",
        path="/v1/providers",
        summary="The providers of a service",
        handler=list_providers,
        query=ProvidersQuery,
        answer=ProviderPage,
        needs="principal",
    ),
)
