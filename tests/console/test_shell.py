"""Signing in and out, the frame of the console, and what every screen has in common."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect

from tests.console.browser import ConsolePage


def test_a_user_signs_in_and_out(open_console: Any) -> None:
    tab: ConsolePage = open_console(None)
    tab.page.goto("/")
    tab.page.get_by_label("Token").fill("a token that nobody has")
    tab.page.get_by_role("button", name="Sign in").click()
    expect(tab.page.get_by_text("no user with this token")).to_be_visible()
    tab.check()
    tab.sign_in("the-token-of-the-administrator")
    tab.check()
    tab.page.get_by_role("button", name="Sign out").click()
    expect(tab.page.get_by_label("Token")).to_be_visible()
    assert tab.page.evaluate("sessionStorage.length") == 0
    assert tab.faults == []


def test_queues_are_listed(console: ConsolePage) -> None:
    console.visit("/queues")
    expect(console.row("orders").first).to_be_visible()
    console.check()
