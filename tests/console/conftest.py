"""One browser and one hub with real traffic for all tests of the console."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from crosswire.cli.hub import Api
from crosswire.testing import RunningHub, running_hub
from tests.console.browser import BrowserThread, ConsolePage
from tests.console.flows import flowing
from tests.console.traffic import ADMINISTRATOR, CONFIGURATION, make_traffic


@pytest.fixture(scope="session")
def browser_thread() -> Iterator[BrowserThread]:
    thread = BrowserThread()
    try:
        thread.start()
        yield thread
    finally:
        thread.stop()


@pytest.fixture(scope="session")
def hub() -> Iterator[RunningHub]:
    """A hub with users and traffic of several protocols, see traffic.py."""
    with running_hub(config=CONFIGURATION) as hub:
        make_traffic(hub)
        yield hub


@pytest.fixture(scope="session")
def flows(hub: RunningHub) -> Iterator[Api]:
    """Traffic that goes on, see flows.py; gives the hub's API."""
    with flowing(hub) as api:
        yield api


@pytest.fixture
def open_console(browser_thread: BrowserThread, hub: RunningHub) -> Iterator[Any]:
    """Opens a tab: `open_console(token)` signs in; options are those of a browser's context."""
    opened: list[ConsolePage] = []

    def open_tab(token: str | None = ADMINISTRATOR, **options: Any) -> ConsolePage:
        browser = browser_thread.browser
        assert browser is not None
        tab = browser_thread.run(lambda: ConsolePage(browser, hub.url("http"), **options))
        opened.append(tab)
        if token is not None:
            browser_thread.run(lambda: tab.sign_in(token))
        return tab

    yield open_tab
    for tab in opened:
        browser_thread.run(tab.close)


@pytest.fixture
def console(open_console: Any) -> ConsolePage:
    """A tab in which an administrator is signed in."""
    tab: ConsolePage = open_console()
    return tab


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that use the browser in its thread."""
    if "browser_thread" not in pyfuncitem.fixturenames:
        return None
    thread: BrowserThread = pyfuncitem.funcargs["browser_thread"]
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    thread.run(lambda: pyfuncitem.obj(**arguments))
    return True
