"""Debian's Chromium under Playwright, in a thread of its own, and what tests ask a page for.

Playwright's synchronous API runs an event loop that other tests of the process would meet: in its
own thread it meets none. Tests of this folder run in that thread, see conftest.py.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar
from urllib.parse import quote

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Playwright,
    expect,
    sync_playwright,
)

T = TypeVar("T")

_ARGUMENTS: Final = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# A refusal that the console shows is reported by the browser, too; it is no fault of a script.
_EXPECTED: Final = re.compile(r"Failed to load resource: the server responded with a status of")
PATIENCE_MS: Final = 20_000
"""How long a page may take: other tests occupy the processors."""


def browser_path() -> str:
    """The browser to drive. Raises RuntimeError with what to do if there is none."""
    found = os.environ.get("CROSSWIRE_TEST_BROWSER") or shutil.which("chromium")
    if found is None:
        raise RuntimeError(
            "tests of the console need Chromium: `apt-get install chromium` as root, or"
            " CROSSWIRE_TEST_BROWSER=/path/to/chrome"
        )
    return found


class BrowserThread:
    """A thread with a browser; what runs in it may use Playwright."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._work = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="browser")
        self._thread.start()
        self._playwright: Playwright | None = None
        self.browser: Browser | None = None

    def run(self, act: Callable[[], T]) -> T:
        """Run a function in the thread; returns what it returns, or raises what it raises."""
        if threading.current_thread() is self._thread:
            return act()
        future: Future[T] = Future()
        self._work.put((act, future))
        return future.result()

    def start(self) -> None:
        """Start the browser."""

        def launch() -> None:
            self._playwright = sync_playwright().start()
            self.browser = self._playwright.chromium.launch(
                executable_path=browser_path(), args=_ARGUMENTS
            )

        expect.set_options(timeout=PATIENCE_MS)
        self.run(launch)

    def stop(self) -> None:
        """End browser and thread."""

        def end() -> None:
            if self.browser is not None:
                self.browser.close()
            if self._playwright is not None:
                self._playwright.stop()

        self.run(end)
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            act, future = item
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)


class ConsolePage:
    """A tab with the console, which notes every error of its scripts and of its policy."""

    def __init__(self, browser: Browser, base_url: str, **options: Any) -> None:
        self.base_url = base_url
        self.context: BrowserContext = browser.new_context(base_url=base_url, **options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.faults: list[str] = []
        self.page.on("console", self._on_message)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))

    def _on_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not _EXPECTED.match(message.text):
            self.faults.append(message.text)

    def close(self) -> None:
        """Close the tab."""
        self.context.close()

    # Screens.

    def sign_in(self, token: str) -> None:
        """Open the console and sign in."""
        self.page.goto("/")
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        expect(self.page.get_by_role("banner")).to_be_visible()

    def visit(self, screen: str) -> None:
        """Go to a screen by its route, such as `/queues` or `/dead/orders`, and wait for it."""
        go = "target => { location.hash = target; return location.hash; }"
        address = self.page.evaluate(go, screen)
        expect(self.page.locator("main")).to_have_attribute("data-screen", address)
        expect(self.page.locator("main h1")).to_be_visible()
        expect(self.page.locator("main [aria-busy]")).to_have_count(0)

    def row(self, text: str) -> Locator:
        """The rows of tables that contain a text."""
        return self.page.locator("main tbody tr").filter(has_text=text)

    def accessibility_faults(self, *rules: str) -> list[str]:
        """Serious and critical faults that axe finds on the page as it is, by all of its rules or
        by these."""
        options: dict[str, Any] = {"resultTypes": ["violations"]}
        if rules:
            options["runOnly"] = list(rules)
        if self.page.evaluate("typeof axe") == "undefined":
            self.page.evaluate(AXE_SCRIPT)
        run = "async (options) => (await axe.run(options)).violations"
        found = self.page.evaluate(run, options)
        return [
            f"{each['id']} ({each['impact']}): {node['html']}: {node.get('failureSummary', '')}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    def check(self) -> None:
        """Assert that the screen is accessible, and that nothing failed so far."""
        assert self.accessibility_faults() == []
        assert self.faults == []


def part(name: str) -> str:
    """A name as a part of a route."""
    return quote(name, safe="")
