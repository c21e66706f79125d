"""The protocol analyzer: uploaded captures and live connections, frame by frame."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

import crosswire
from crosswire.cli.hub import Api
from crosswire.testing import RunningHub
from crosswire.testing.traffic import SampleTraffic, packets, write_pcap
from crosswire.wire.emp.frames import Hello, Ping, Request, serialize, serialize_call
from tests.console.browser import ConsolePage
from tests.console.traffic import ADMINISTRATOR, OBSERVER

BAD = bytes.fromhex("0000000463000000")
"""A message of EMP with a type that does not exist."""


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All protocols at the same time, with a violation in the end."""
    file = tmp_path_factory.mktemp("captures") / "shop <b>traffic.pcap"
    talks = list(SampleTraffic(connections=5, messages=30, payload_bytes=100).conversations())
    last_us = talks[0].chunks[-1][0]
    talks[0] = replace(talks[0], chunks=(*talks[0].chunks, (last_us + 1, True, BAD)))
    records = [each for talk in talks for each in packets(talk)]
    write_pcap(file, sorted(records, key=lambda each: each[0]))
    return file


def upload(console: ConsolePage, file: Path) -> None:
    console.visit("/analyzer")
    expect(console.page.get_by_role("heading", name="Protocol analyzer")).to_be_visible()
    console.page.set_input_files("input[type=file]", str(file))


def frames(console: ConsolePage) -> Locator:
    return console.page.get_by_role("listbox", name="Frames").get_by_role("option")


def status(console: ConsolePage) -> Locator:
    return console.page.locator(".frames > .table-status")


def marked(console: ConsolePage) -> str:
    """The bytes that are highlighted."""
    return "".join(console.page.locator(".octet.marked").all_inner_texts())


def test_a_capture_is_analyzed(console: ConsolePage, capture: Path) -> None:
    upload(console, capture)
    page = console.page
    expect(page.get_by_role("heading", name="shop <b>traffic.pcap")).to_be_visible()
    expect(page.locator(".subtitle")).to_contain_text("1 violation")
    expect(frames(console).first).to_contain_text("hello")
    console.check()

    # From a frame to a field, to its bytes.
    frames(console).filter(has_text="$publish").first.click()
    detail = page.get_by_label("The chosen frame")
    expect(detail.get_by_role("heading", name=re.compile("request"))).to_be_visible()
    expect(detail.get_by_role("link", name="queue/orders")).to_be_visible()
    page.get_by_role("treeitem", name="destination").last.click()
    expect(page.locator(".octet.marked")).not_to_have_count(0)
    assert bytes.fromhex(marked(console)) == b'"queue/orders"'
    console.check()

    # From a byte to its field.
    page.locator(".hex [data-byte='15']").first.click()
    expect(page.get_by_role("treeitem", name="id").first).to_have_attribute("aria-selected", "true")
    assert len(bytes.fromhex(marked(console))) == 8
    page.locator(".hex [data-byte='4']").first.click()
    chosen = page.locator("[role=treeitem][aria-selected=true]")
    expect(chosen).to_contain_text("type")

    # The state is in the address.
    page.locator(".hex [data-byte='15']").first.click()
    assert re.search(r"\?n=\d+&field=id$", page.url)
    page.reload()
    expect(page.get_by_role("treeitem", name="id").first).to_have_attribute("aria-selected", "true")
    expect(page.locator(".octet.marked")).to_have_count(8)
    expect(page.locator("[role=option][aria-selected=true]")).to_contain_text("$publish")


def test_a_conversation_is_followed(console: ConsolePage, capture: Path) -> None:
    upload(console, capture)
    page = console.page
    frames(console).filter(has_text="$publish").first.click()
    page.get_by_role("button", name="Follow conversation").click()
    expect(status(console)).to_have_text("2 frames")
    expect(frames(console).first).to_contain_text("request")
    expect(frames(console).last).to_contain_text("response")
    expect(page.get_by_role("heading", name=re.compile("^Frame .* request"))).to_be_visible()
    console.check()
    page.get_by_role("button", name="Show all frames").click()
    expect(status(console)).to_contain_text("more when you scroll")


def test_frames_are_filtered(console: ConsolePage, capture: Path) -> None:
    upload(console, capture)
    page = console.page
    expect(frames(console).first).to_be_visible()
    page.get_by_label("Protocol", exact=True).select_option("relink")
    expect(frames(console).first).to_contain_text("connector-version")
    expect(frames(console).filter(has_text="emp").first).not_to_be_visible()
    page.get_by_label("Frame", exact=True).select_option("sequence-acknowledgement")
    expect(frames(console).first).to_contain_text("sequence-acknowledgement")
    page.get_by_label("Frame", exact=True).select_option("")
    page.get_by_label("Protocol", exact=True).select_option("")
    page.get_by_label("Destination contains").fill("queue/jobs")
    expect(frames(console).first).to_contain_text("queue/jobs")
    page.get_by_label("Destination contains").fill("")
    page.get_by_label("Text in fields or bytes").fill('"VALUE": 1')
    expect(frames(console).first).to_contain_text("zmtp-message")
    page.get_by_label("Text in fields or bytes").fill("nowhere to be found")
    expect(status(console)).to_contain_text("No frame matches")
    console.check()
    page.get_by_role("link", name="Show all frames").click()
    expect(frames(console).first).to_contain_text("hello")


def test_a_violation_names_its_clause(console: ConsolePage, capture: Path) -> None:
    upload(console, capture)
    page = console.page
    page.get_by_label("Violations only").check()
    expect(status(console)).to_have_text("1 frame")
    expect(frames(console).first).to_contain_text("message type 99 is not defined")
    frames(console).first.click()
    detail = page.get_by_label("The chosen frame")
    expect(detail).to_contain_text("Breaks EMP, Message types")
    expect(detail).to_contain_text("protocols/emp")
    console.check()


def test_the_keyboard_is_enough(console: ConsolePage, capture: Path) -> None:
    upload(console, capture)
    page = console.page
    expect(frames(console).first).to_be_visible()
    page.get_by_role("listbox", name="Frames").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
    expect(page.get_by_role("heading", name="Frame 2:")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Frame 2:")).to_be_focused()
    tree = page.get_by_role("tree", name="Fields")
    tree.get_by_role("treeitem").first.focus()
    page.keyboard.press("ArrowDown")
    expect(tree.get_by_role("treeitem").nth(1)).to_be_focused()
    expect(page.locator(".octet.marked")).not_to_have_count(0)
    page.locator(".hex").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".octet.cursor")).to_have_attribute("data-byte", "1")
    expect(page.locator(".hex [aria-live]")).to_contain_text("Byte 1")


def test_many_frames_are_few_elements(console: ConsolePage, tmp_path: Path) -> None:
    file = tmp_path / "pings.bin"
    file.write_bytes(serialize(Hello(1)) + 12_000 * serialize(Ping()))
    upload(console, file)
    expect(frames(console).first).to_contain_text("hello")
    page = console.page
    listbox = page.get_by_role("listbox", name="Frames")
    page.wait_for_function(
        """() => {
            const list = document.querySelector(".virtual");
            list.scrollTop = list.scrollHeight;
            const status = document.querySelector(".frames > .table-status");
            return status.textContent === "12,001 frames";
        }"""
    )
    listbox.focus()
    page.keyboard.press("Home")
    page.keyboard.press("End")
    expect(page.get_by_role("heading", name="Frame 12,001: ping")).to_be_visible()
    assert frames(console).count() < 100


def test_what_is_no_capture(console: ConsolePage, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("no capture at all")
    upload(console, file)
    expect(console.page.get_by_role("alert")).to_contain_text("name the protocol")
    console.check()
    console.visit("/analyzer")
    row = console.row("notes.txt")
    expect(row).to_contain_text("failed")
    row.get_by_role("button", name="Remove").click()
    console.page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(console.page.get_by_role("dialog")).to_contain_text("Removed")


def echo(number: int) -> bytes:
    """A request that the hub answers with the same."""
    return serialize(Request(number, serialize_call("$echo", b'{"round":%d}' % number)))


@contextmanager
def raw_connection(hub: RunningHub) -> Iterator[tuple[socket.socket, str]]:
    """A connection whose bytes the test decides, and its id."""
    api = Api(hub.url("http"), ADMINISTRATOR)
    before = {row["id"] for row in api.get("/v1/connections")["connections"]}
    address = hub.url("emp").removeprefix("emp://")
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.settimeout(20)
        call = serialize_call("$authenticate", b'{"token":"%b"}' % ADMINISTRATOR.encode())
        peer.sendall(serialize(Hello(1)) + serialize(Request(1, call)))
        answer = b""
        while b'"success"' not in answer:
            answer += peer.recv(65_536)
        rows = api.get("/v1/connections")["connections"]
        (own,) = [row["id"] for row in rows if row["id"] not in before]
        yield peer, own


def test_a_live_connection_is_watched(console: ConsolePage, hub: RunningHub) -> None:
    with raw_connection(hub) as (peer, own):
        console.visit("/analyzer")
        console.page.get_by_role("link", name=own, exact=True).click()
        page = console.page
        expect(page.locator(".subtitle .tag")).to_have_text("live")
        for number in range(2, 5):
            peer.sendall(echo(number))
        expect(frames(console).filter(has_text="request")).to_have_count(3)
        expect(frames(console).filter(has_text="response")).to_have_count(3)
        frames(console).filter(has_text='"round":3').first.click()
        page.get_by_role("treeitem", name="round").last.click()
        expect(page.locator(".octet.marked")).to_have_count(1)
        page.get_by_role("button", name="Follow conversation").click()
        expect(frames(console)).to_have_count(2)
        page.get_by_role("button", name="Show all frames").click()
        page.get_by_label("Text in fields or bytes").fill('"ROUND":4')
        expect(frames(console)).to_have_count(2)
        page.get_by_label("Text in fields or bytes").fill("")
        expect(frames(console)).not_to_have_count(2)
        console.check()
        peer.sendall(BAD)
        violations = frames(console).filter(has_text="✗ unknown")
        expect(violations).to_have_count(1)
        expect(violations).to_contain_text("message type 99 is not defined")
        ended = page.get_by_text("the connection is closed: message type 99 is not defined")
        expect(ended).to_be_visible()
        expect(page.get_by_text("Breaks EMP, Message types").first).to_be_visible()
        console.check()


def test_a_pause_keeps_what_is_shown(console: ConsolePage, hub: RunningHub) -> None:
    with raw_connection(hub) as (peer, own):
        console.visit(f"/analyzer/live/{own}")
        expect(console.page.locator(".subtitle .tag")).to_have_text("live")
        for number in (2, 3):
            peer.sendall(echo(number))
        expect(frames(console).filter(has_text='"round":3').first).to_be_visible()
        console.page.get_by_role("button", name="Pause").click()
        peer.sendall(echo(4))
        expect(status(console)).to_contain_text("passed meanwhile")
        console.page.get_by_role("button", name="Continue").click()
        peer.sendall(echo(5))
        expect(frames(console).filter(has_text='"round":5').first).to_be_visible()
        expect(frames(console).filter(has_text='"round":4')).to_have_count(0)


def test_an_observer_analyzes_captures_but_sees_no_frames_of_others(
    open_console: Any, capture: Path, hub: RunningHub
) -> None:
    tab: ConsolePage = open_console(OBSERVER)
    upload(tab, capture)
    expect(frames(tab).first).to_contain_text("hello")
    with crosswire.connect_sync(hub.url("emp"), token=ADMINISTRATOR):
        rows = Api(hub.url("http"), ADMINISTRATOR).get("/v1/connections")["connections"]
        tab.visit(f"/analyzer/live/{rows[0]['id']}")
        expect(tab.page.get_by_role("alert")).to_contain_text("may not administer this hub")
    tab.check()


def test_a_small_screen(open_console: Any, capture: Path) -> None:
    tab: ConsolePage = open_console(viewport={"width": 390, "height": 844}, color_scheme="dark")
    upload(tab, capture)
    frames(tab).filter(has_text="$publish").first.click()
    expect(tab.page.get_by_role("heading", name=re.compile("^Frame"))).to_be_in_viewport()
    expect(tab.page.locator(".hex-line").first).to_be_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    tab.check()
