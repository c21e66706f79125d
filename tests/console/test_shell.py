"""Signing in and out, the frame of the console, and what every screen has in common."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from crosswire.cli.hub import Api
from crosswire.testing import running_hub
from tests.console.browser import BrowserThread, ConsolePage, part
from tests.console.traffic import ADMINISTRATOR, HOSTILE, HOSTILE_TEXT, OBSERVER, SHOP

SCREENS = (
    "/",
    "/queues?contains=o",
    "/queues/orders",
    "/queues/backlog?tab=waiting",
    "/queues/orders?tab=consumers",
    "/queues/orders?tab=policy",
    "/messages",
    "/messages/2",
    "/dead",
    "/dead/letters",
    "/dead/letters/14",
    "/replays",
    "/tail",
    "/tail?destination=queue/orders",
    "/nowhere",
    "/queues/not-there",
)


def test_a_user_signs_in_and_out(open_console: Any) -> None:
    tab: ConsolePage = open_console(None)
    tab.page.goto("/")
    tab.page.get_by_label("Token").fill("a token that nobody has")
    tab.page.get_by_role("button", name="Sign in").click()
    expect(tab.page.get_by_text("no user with this token")).to_be_visible()
    tab.check()
    tab.sign_in(ADMINISTRATOR)
    tab.page.get_by_role("button", name="Sign out").click()
    expect(tab.page.get_by_label("Token")).to_be_visible()
    assert tab.page.evaluate("sessionStorage.length") == 0
    assert tab.faults == []


@pytest.mark.parametrize(("scheme", "rules"), [("light", ()), ("dark", ("color-contrast",))])
def test_every_screen_is_accessible(open_console: Any, scheme: str, rules: tuple[str, ...]) -> None:
    """By all rules; what a dark theme can change is contrast."""
    tab: ConsolePage = open_console(color_scheme=scheme)
    for screen in SCREENS:
        tab.visit(screen)
        assert tab.accessibility_faults(*rules) == [], screen
    assert tab.faults == []


def test_on_a_phone_nothing_is_wider_than_the_screen(open_console: Any) -> None:
    tab: ConsolePage = open_console(viewport={"width": 390, "height": 844})
    for screen in SCREENS:
        tab.visit(screen)
        wider = tab.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wider <= 0, f"{screen} is {wider} pixels too wide"
    tab.page.get_by_role("button", name="Menu").click()
    tab.page.get_by_role("link", name="Queues", exact=True).click()
    expect(tab.page.get_by_role("heading", name="Queues", level=1)).to_be_visible()
    tab.check()


def test_a_phone_sorts_lists_and_shows_the_current_tab(open_console: Any) -> None:
    tab: ConsolePage = open_console(viewport={"width": 390, "height": 844})
    tab.visit("/queues")
    expect(tab.page.get_by_role("button", name="Messages", exact=True)).to_have_count(0)
    tab.page.get_by_label("Sorted by").select_option(label="Dead letters")
    expect(tab.page).to_have_url(re.compile("sort=dead"))
    # In order of names a queue without any is the first.
    expect(tab.page.locator("main tbody th").first).to_have_text(re.compile("orders|letters"))
    tab.check()
    tab.visit("/queues/orders?tab=policy")
    current = tab.page.get_by_role("link", name="Policy and retries")
    assert current.evaluate("each => each.getBoundingClientRect().right") <= 390
    expect(tab.page.get_by_text("[queues.orders]")).to_be_visible()
    tab.check()


def test_a_screen_that_fails_leads_on(console: ConsolePage) -> None:
    console.visit("/queues/not-there")
    expect(console.page.get_by_text("there is no queue 'not-there'")).to_be_visible()
    console.page.get_by_role("link", name="Go to queues").click()
    expect(console.page.get_by_role("heading", name="Queues", level=1)).to_be_visible()


def test_lists_fit_beside_the_navigation(open_console: Any, flows: Api) -> None:
    tab: ConsolePage = open_console(viewport={"width": 1024, "height": 768})
    assert flows.get("/v1/schedules")["schedules"]
    for screen in ("/queues", "/messages", "/dead/letters", "/schedules", "/connections"):
        tab.visit(screen)
        wider = "each => Math.max(each.scrollWidth - each.clientWidth, 0)"
        for frame in tab.page.locator(".list .table-frame").all():
            assert frame.evaluate(wider) == 0, screen


def test_hostile_names_are_shown_as_they_are(console: ConsolePage) -> None:
    console.visit("/queues")
    for name in HOSTILE:
        console.visit(f"/queues?contains={part(name)}")
        row = console.row("")
        expect(row).to_have_count(1)
        row.get_by_role("link").first.click()
        visible = name.replace("\u202e", "\\u202e").replace("\u200f", "\\u200f")
        expect(console.page.locator("main h1 bdi")).to_have_text(visible)
        expect(console.page.locator("main h1 bdi")).to_have_css("unicode-bidi", "isolate")
        console.row("").get_by_role("link").first.click()
        expect(console.page.get_by_label("Payload")).to_contain_text("a\\u0007bell\\u001b[31m")
        assert console.page.locator("main b", has_text="bold").count() == 0
    console.check()
    assert "\u0007" in HOSTILE_TEXT


def test_who_may_not_is_refused(open_console: Any) -> None:
    tab: ConsolePage = open_console(SHOP)
    tab.visit("/queues")
    expect(tab.row("shop/orders")).to_be_visible()
    names = tab.page.locator("main tbody tr th").all_inner_texts()
    assert all(name.startswith("shop/") for name in names), names
    tab.visit("/queues/orders")
    expect(tab.page.get_by_role("alert")).to_contain_text("shop has no right to queue/orders")
    tab.visit("/queues/shop%2Forders")
    expect(tab.page.get_by_role("heading", name="shop/orders")).to_be_visible()
    expect(tab.page.get_by_role("button", name="Purge…")).to_have_count(0)
    tab.visit("/")
    expect(tab.page.get_by_text("needs the right to observe")).to_be_visible()
    tab.check()


def test_an_observer_sees_no_content(open_console: Any) -> None:
    tab: ConsolePage = open_console(OBSERVER)
    tab.visit("/messages/2")
    expect(tab.page.get_by_text("The content is hidden")).to_be_visible()
    tab.visit("/tail?destination=queue/orders")
    expect(tab.page.get_by_role("alert")).to_contain_text("may not consume queue/orders")
    tab.visit("/")
    expect(tab.page.get_by_role("heading", name="Live events")).to_be_visible()
    tab.check()


def test_the_theme_can_be_chosen(console: ConsolePage) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    system = console.page.evaluate(background)
    console.page.get_by_role("button", name="Theme: system").click()
    assert console.page.evaluate(background) == system
    console.page.get_by_role("button", name="Theme: light").click()
    assert console.page.evaluate(background) != system
    console.page.reload()
    expect(console.page.get_by_role("button", name="Theme: dark")).to_be_visible()


def test_a_revoked_token_ends_the_session(browser_thread: BrowserThread, tmp_path: Path) -> None:
    user = '[[users]]\nname = "{}"\ntoken = "{}"\nadminister = true\n'
    token = "a-token-that-will-be-revoked"
    config = user.format("anna", token)
    assert browser_thread.browser is not None
    with running_hub(config=config) as hub:
        tab = ConsolePage(browser_thread.browser, hub.url("http"))
        try:
            tab.sign_in(token)
            tab.visit("/queues")
            file = next(iter(hub.data.parent.glob("crosswire.toml")))
            file.write_text(user.format("bert", "the-token-of-somebody-else"))
            hub.send_signal(signal.SIGHUP)
            expect(tab.page.get_by_label("Token")).to_be_visible()
            expect(tab.page.get_by_text("no longer accepts the token")).to_be_visible()
            assert tab.page.evaluate("sessionStorage.length") == 0
        finally:
            tab.close()


def test_without_users_the_console_says_so(browser_thread: BrowserThread) -> None:
    assert browser_thread.browser is not None
    with running_hub() as hub:
        tab = ConsolePage(browser_thread.browser, hub.url("http"))
        try:
            tab.page.goto("/")
            expect(tab.page.get_by_text("No users are configured")).to_be_visible()
            tab.visit("/queues")
            expect(tab.page.get_by_text("There are no queues yet")).to_be_visible()
            tab.check()
        finally:
            tab.close()


def test_a_standby_names_the_leader(open_console: Any) -> None:
    """The API of a standby is tested with replicas; here it is what the console makes of it."""
    tab: ConsolePage = open_console(None)
    session = {
        "user": "admin",
        "open": False,
        "observe": True,
        "administer": True,
        "role": "standby",
        "node": "abc",
        "leader": "north",
        "leader_address": "http://127.0.0.1:7390",
        "version": "1",
    }
    replica = {
        "name": "north",
        "address": "http://127.0.0.1:7390",
        "role": "leader",
        "version": "1",
        "format": 1,
        "synced": 12,
        "lag": 0,
        "age_s": 0.5,
    }
    state = session | {
        "name": "south",
        "term": 3,
        "log": "",
        "applied": 12,
        "takeovers": 0,
        "trouble": "",
        "fault": "",
        "alarms": ["only one replica reports"],
        "replicas": [replica],
    }
    tab.page.route("**/v1/session", lambda route: route.fulfill(json=session))
    tab.page.route("**/v1/replication", lambda route: route.fulfill(json=state))
    tab.page.goto("/#/queues")
    expect(tab.page.get_by_text("The leader is north at http://127.0.0.1:7390.")).to_be_visible()
    link = tab.page.get_by_role("link", name="Go to the leader's console")
    expect(link).to_have_attribute("href", "http://127.0.0.1:7390/")
    expect(tab.page.get_by_text("only one replica reports")).to_be_visible()
    expect(tab.row("north")).to_contain_text("leader")
    tab.check()


def test_every_screen_of_the_table_is_loaded() -> None:
    """A route whose module does not exist would fail only when somebody goes there."""
    folder = Path(__file__).parents[2] / "src/crosswire/web/console"
    loaded = re.findall(r'import\("\./(screens/\w+\.js)"\)', (folder / "routes.js").read_text())
    assert {(folder / each).is_file() for each in loaded} == {True}
    assert {f"screens/{each.name}" for each in folder.glob("screens/*.js")} == set(loaded)
