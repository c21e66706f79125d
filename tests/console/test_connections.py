"""Connections, services and schedules in the console."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

import crosswire
from crosswire.cli.hub import Api
from crosswire.testing import RunningHub
from tests.console.browser import ConsolePage
from tests.console.traffic import ADMINISTRATOR, HOSTILE, OBSERVER, SHOP


def test_connections_show_what_they_do_and_why_they_ended(
    console: ConsolePage, flows: Api, hub: RunningHub
) -> None:
    console.visit("/connections?protocol=emp&principal=shop&sort=age")
    # The client has a connection for its requests, and one for its subscription.
    expect(console.page.locator("main tbody tr")).to_have_count(2)
    expect(console.row("shop")).to_have_count(2)
    console.check()
    with (
        crosswire.connect_sync(hub.url("emp"), token=ADMINISTRATOR) as client,
        client.subscribe("queue/closing", window=1),
    ):
        (consumer,) = flows.get("/v1/consumers", queue="closing")["consumers"]
        found = consumer["connection"]
        console.visit(f"/connections/{found}")
        link = console.page.get_by_role("link", name="Frames, live")
        expect(link).to_have_attribute("href", f"#/analyzer/live/{found}")
        expect(console.row("queue/closing")).to_be_visible()
        expect(console.page.get_by_text("It serves nothing.")).to_be_visible()
        console.check()
        console.page.get_by_role("button", name="Close…").click()
        dialog = console.page.get_by_role("dialog")
        dialog.get_by_role("button", name="Close the connection").click()
        expect(dialog).to_contain_text("is closed")
        dialog.get_by_role("button", name="Close", exact=True).click()
        expect(console.page.get_by_text("closed by admin")).to_be_visible()
    console.visit("/connections?tab=closed&contains=closed%20by%20admin&sort=lasted")
    expect(console.row(found)).to_contain_text("closed by admin")
    console.check()


def test_connections_of_others_are_for_observers(open_console: Any, flows: Api) -> None:
    shop: ConsolePage = open_console(SHOP)
    shop.visit("/connections")
    expect(shop.row("shop")).to_have_count(2)
    expect(shop.page.locator("main tbody tr")).to_have_count(2)
    others = flows.get("/v1/connections", principal="admin")["connections"][0]["id"]
    shop.visit(f"/connections/{others}")
    expect(shop.page.get_by_text("there is no connection")).to_be_visible()
    observer: ConsolePage = open_console(OBSERVER)
    observer.visit(f"/connections/{others}")
    expect(observer.page.locator("main h1")).to_have_text(others)
    expect(observer.page.get_by_role("button", name="Close…")).to_have_count(0)


def test_services_show_calls_latency_errors_and_providers(console: ConsolePage, flows: Api) -> None:
    console.visit("/services?sort=latency")
    expect(console.row("sums")).to_contain_text("(1 of 5)")
    expect(console.row(HOSTILE[0])).to_be_visible()
    console.row("sums").locator("a.id").click()
    expect(console.row("service/sums")).to_be_visible()
    console.check()


def test_a_schedule_is_paused_resumed_fired_and_deleted(console: ConsolePage, flows: Api) -> None:
    flows.post("/v1/schedules", {"id": "hourly", "destination": "queue/reports", "text": "x",
                                 "cron": "0 * * * *"})  # fmt: skip
    console.visit("/schedules?sort=due")
    expect(console.row(HOSTILE[4])).to_be_visible()
    row = console.row("hourly")
    row.get_by_role("button", name="Pause hourly").click()
    expect(row).to_contain_text("paused")
    row.get_by_role("button", name="Resume hourly").click()
    expect(row.get_by_role("button", name="Pause hourly")).to_be_visible()
    row.get_by_role("button", name="Fire now hourly").click()
    dialog = console.page.get_by_role("dialog")
    dialog.get_by_role("button", name="Fire", exact=True).click()
    expect(dialog).to_contain_text("It is sent as message")
    console.check()
    dialog.get_by_role("button", name="Close").click()
    row.get_by_role("button", name="Delete hourly").click()
    dialog.get_by_role("button", name="Delete the schedule").click()
    expect(dialog).to_contain_text("is deleted")
    dialog.get_by_role("button", name="Close").click()
    expect(row).to_have_count(0)


def test_a_schedule_is_added_after_a_look_at_its_times(console: ConsolePage, flows: Api) -> None:
    console.visit("/schedules")
    console.page.get_by_role("button", name="Add a schedule…").click()
    dialog = console.page.get_by_role("dialog")
    dialog.get_by_label("Id").fill("added")
    dialog.get_by_label("Destination").fill("queue/reports")
    dialog.get_by_label("Or a cron").fill("0 4 * * *")
    dialog.get_by_role("button", name="Dry run").click()
    expect(dialog).to_contain_text("It would fire")
    dialog.get_by_role("button", name="Add", exact=True).click()
    expect(dialog).to_contain_text("fires next")
    dialog.get_by_role("button", name="Close").click()
    expect(console.row("added")).to_contain_text("0 4 * * *")


def test_who_may_not_administer_changes_no_schedule(open_console: Any, flows: Api) -> None:
    observer: ConsolePage = open_console(OBSERVER)
    observer.visit("/schedules")
    expect(observer.row("nightly")).to_be_visible()
    expect(observer.page.get_by_role("button", name="Pause")).to_have_count(0)
    observer.check()
