"""Users, rights, the lake with the last report, the configuration, and narrow screens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from crosswire.cli.hub import Api
from tests.console.browser import ConsolePage
from tests.console.traffic import OBSERVER, SHOP

SCREENS = (
    "/topics", "/topics/prices", "/subscriptions", "/subscriptions/live?owner=admin",
    "/connections", "/connections?tab=closed", "/services", "/schedules", "/users",
    "/access?right=consume&destination=queue%2Forders&user=shop", "/lake", "/lake?tab=files",
    "/lake?tab=gaps", "/configuration",
)  # fmt: skip


def test_a_right_is_explained_by_its_rule(console: ConsolePage, flows: Api) -> None:
    console.visit("/users?contains=shop")
    expect(console.row("shop")).to_contain_text("queue/shop/#")
    console.check()
    console.row("shop").get_by_role("link", name="Explain a right").click()
    console.page.get_by_label("Destination", exact=True).fill("queue/orders")
    console.page.get_by_role("button", name="Explain").click()
    answer = console.page.get_by_role("alert")
    expect(answer).to_contain_text("Forbidden: shop may not consume queue/orders")
    expect(answer).to_contain_text("The rule that decides")
    console.check()
    console.page.get_by_label("Wants to").select_option("observe")
    expect(console.page.get_by_label("Destination", exact=True)).to_be_hidden()
    console.page.get_by_role("button", name="Explain").click()
    expect(answer).to_contain_text("shop may not observe this hub")


def test_a_user_sees_itself_only(open_console: Any, flows: Api) -> None:
    shop: ConsolePage = open_console(SHOP)
    shop.visit("/users")
    expect(shop.page.locator("main tbody tr")).to_have_count(1)
    shop.visit("/access?right=produce&destination=queue%2Fshop%2Fx&user=shop")
    expect(shop.page.get_by_label("User", exact=True)).to_be_disabled()
    expect(shop.page.locator(".notice.good")).to_contain_text("shop may produce queue/shop/x")
    names = shop.page.get_by_role("navigation").get_by_role("link").all_text_contents()
    assert "Configuration" not in names and "Lake and report" not in names
    shop.visit("/configuration")
    expect(shop.page.get_by_role("alert")).to_contain_text("may not administer")


@pytest.fixture
def report(flows: Api) -> Iterator[Path]:
    path = Path(flows.get("/v1/report")["path"])
    yield path
    path.unlink(missing_ok=True)


def test_the_last_report_is_opened_apart_from_the_console(
    console: ConsolePage, open_console: Any, report: Path
) -> None:
    console.visit("/lake")
    expect(console.page.get_by_text("There is no report yet.")).to_be_visible()
    console.check()
    report.write_text("<!doctype html><title>the report</title><script>document.title = 1</script>")
    console.page.reload()
    with console.context.expect_page() as opened:
        console.page.get_by_role("button", name="Open the report").click()
    expect(opened.value).to_have_title("the report")
    assert opened.value.evaluate("origin") == "null"
    assert "/report/" in opened.value.url
    observer: ConsolePage = open_console(OBSERVER)
    observer.visit("/lake")
    expect(observer.page.get_by_text("needs the right to administer")).to_be_visible()
    expect(observer.page.get_by_role("button", name="Open the report")).to_have_count(0)


def test_the_configuration_is_searched_and_hides_secrets(console: ConsolePage, flows: Api) -> None:
    console.visit("/configuration")
    expect(console.page.get_by_text("Nothing waits for a restart")).to_be_visible()
    console.page.get_by_label("Name or value contains").fill("users.shop")
    expect(console.row("users.shop.token(hidden)")).to_be_visible()
    assert "the-token-of-the-shop" not in console.page.content()
    console.check()


def test_screens_fit_a_phone_in_dark(open_console: Any, flows: Api) -> None:
    tab: ConsolePage = open_console(color_scheme="dark", viewport={"width": 390, "height": 800})
    for screen in SCREENS:
        tab.visit(screen)
        wide = tab.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, screen
        # The others are checked in the light theme, where they are tested.
        if screen in ("/subscriptions", "/schedules", "/users", "/lake", "/configuration"):
            assert tab.accessibility_faults() == [], screen
    assert tab.faults == []
