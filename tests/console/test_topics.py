"""Topics and named subscriptions: their lag, and a deletion with its backlog."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from crosswire.cli.hub import Api
from tests.console.browser import ConsolePage, part
from tests.console.flows import TOPICS
from tests.console.traffic import OBSERVER, SHOP


def test_topics_lead_to_their_messages_and_subscriptions(console: ConsolePage, flows: Api) -> None:
    console.visit("/topics?sort=published")
    expect(console.page.locator("main tbody tr").first).to_contain_text("prices")
    console.check()
    console.row("prices").get_by_role("link", name="prices", exact=True).click()
    expect(console.page.locator("main h1")).to_have_text("prices")
    expect(console.row("published").first).to_be_visible()
    console.page.get_by_role("link", name="Named subscriptions", exact=True).click()
    expect(console.row("audit")).to_contain_text("away")
    console.check()


def test_topics_with_hostile_names_are_shown(console: ConsolePage, flows: Api) -> None:
    for name in TOPICS:
        console.visit(f"/topics/{part(name)}")
        heading = name.replace("\u202e", "\\u202e").replace("\u200f", "\\u200f")
        expect(console.page.locator("main h1")).to_have_text(heading)
        expect(console.page.locator("main tbody tr")).to_have_count(1)
    console.check()


def test_a_subscription_is_deleted_with_its_backlog(console: ConsolePage, flows: Api) -> None:
    console.visit("/subscriptions?sort=lag")
    expect(console.row("live")).to_contain_text("0")
    console.row("parked").get_by_role("link", name="parked").click()
    expect(console.page.locator(".tile").first).to_contain_text("3")
    console.check()
    console.page.get_by_role("button", name="Delete…").click()
    dialog = console.page.get_by_role("dialog")
    expect(dialog).to_contain_text("3 messages that it has not settled")
    console.check()
    dialog.get_by_role("button", name="Delete the subscription").click()
    expect(dialog).to_contain_text("is deleted, with 3 messages")
    dialog.get_by_role("button", name="Close").click()
    expect(console.row("audit")).to_be_visible()
    expect(console.row("parked")).to_have_count(0)


def test_a_subscription_in_use_is_not_deleted(console: ConsolePage, flows: Api) -> None:
    console.visit("/subscriptions/live?owner=admin")
    expect(console.page.get_by_text("Nobody consumes it now")).to_have_count(0)
    console.page.get_by_role("button", name="Delete…").click()
    dialog = console.page.get_by_role("dialog")
    expect(dialog).to_contain_text("must leave first")
    dialog.get_by_role("button", name="Delete the subscription").click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    assert flows.get("/v1/subscriptions/live", owner="admin")["name"] == "live"


def test_others_see_what_they_may(open_console: Any, flows: Api) -> None:
    shop: ConsolePage = open_console(SHOP)
    shop.visit("/topics")
    expect(shop.page.get_by_text("There are no topics yet.")).to_be_visible()
    shop.visit("/subscriptions")
    expect(shop.page.get_by_text("There are no named subscriptions.")).to_be_visible()
    shop.visit("/subscriptions/live?owner=admin")
    expect(shop.page.get_by_text("there is no subscription")).to_be_visible()
    observer: ConsolePage = open_console(OBSERVER)
    observer.visit("/subscriptions/live?owner=admin")
    expect(observer.page.locator("main h1")).to_have_text("live")
    expect(observer.page.get_by_role("button", name="Delete…")).to_have_count(0)
    observer.check()
