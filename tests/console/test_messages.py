"""What an engineer does at night: find a message, mend a dead letter, watch what arrives."""

from __future__ import annotations

import re

from playwright.sync_api import Route, expect

import crosswire
from crosswire.cli.hub import Api
from crosswire.testing import RunningHub
from crosswire.web.paging import cursor_of
from tests.console.browser import ConsolePage
from tests.console.traffic import ADMINISTRATOR, SHOP


def api(hub: RunningHub, token: str = ADMINISTRATOR) -> Api:
    return Api(hub.url("http"), token)


def produce(hub: RunningHub, destination: str, *texts: str) -> list[int]:
    messages = [{"destination": destination, "text": text} for text in texts]
    ids: list[int] = api(hub).post("/v1/messages", {"messages": messages})["ids"]
    return ids


def test_a_lost_message_is_found_by_its_queues_name_in_three_clicks(console: ConsolePage) -> None:
    """The name is typed into the frame's field; then each click is counted."""
    page = console.page
    page.get_by_role("searchbox", name="Go to a queue").fill("orders")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="orders", exact=True).click()
    dead = page.get_by_role("row").filter(has=page.get_by_text("dead", exact=True))
    dead.first.get_by_role("link").first.click()
    expect(page.get_by_role("heading", name="What happened")).to_be_visible()
    expect(page.locator(".waterfall")).to_contain_text("refused: unknown item")
    expect(page.get_by_text("It became the dead letter")).to_be_visible()
    console.check()


def test_a_trace_shows_both_protocols_and_their_bytes(
    console: ConsolePage, hub: RunningHub
) -> None:
    found = api(hub).get("/v1/messages", destination="queue/bridge")["messages"][0]["message"]
    console.visit(f"/messages/{found['id']}")
    page = console.page
    steps = page.locator(".waterfall > li")
    expect(steps).to_have_count(3)
    expect(steps.nth(0)).to_contain_text("micromsg2")
    expect(steps.nth(1)).to_contain_text("emp")
    expect(page.locator(".bar")).to_have_count(3)
    # The tap writes a little later.
    while page.locator("details.frame").count() < 2:
        with page.expect_response("**/v1/messages/*"):
            page.get_by_role("button", name="Refresh").click()
        expect(page.get_by_role("heading", name="Bytes on the wire")).to_be_visible()
    frame = page.locator("details.frame").first
    frame.locator("summary").click()
    lines = frame.get_by_label("Bytes").inner_text().splitlines()
    assert '{"from":"micromsg2"}' in "".join(line[-16:].strip() for line in lines)
    console.check()


def test_messages_are_searched_by_the_hub(console: ConsolePage) -> None:
    console.visit("/messages")
    page = console.page
    page.get_by_label("Destination", exact=True).fill("queue/letters")
    page.get_by_label("Text in payload").fill("twelve")
    page.get_by_role("button", name="Search").click()
    expect(console.row("twelve")).to_have_count(3)
    assert "destination=queue" in page.url
    page.reload()
    expect(console.row("twelve")).to_have_count(3)
    console.check()


def test_a_search_goes_on_until_it_finds_something(console: ConsolePage) -> None:
    """A request looks for some seconds: the first one ends before it has found anything."""
    page = console.page
    newest = cursor_of(1 << 40)

    def answer(route: Route) -> None:
        if "cursor=" in route.request.url:
            route.continue_()
        else:
            route.fulfill(json={"messages": [], "next": newest})

    page.route("**/v1/messages?*", answer)
    console.visit("/messages?destination=queue/letters&text=twelve")
    expect(console.row("twelve")).to_have_count(3)
    console.check()


def test_a_long_search_can_be_stopped(console: ConsolePage) -> None:
    page = console.page
    empty = {"messages": [], "next": cursor_of(1 << 40)}
    page.route("**/v1/messages?*", lambda route: route.fulfill(json=empty))
    console.visit("/messages?text=nothing")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Look further")).to_be_visible()
    expect(page.get_by_text("There is more to look through")).to_be_visible()
    console.check()


def test_a_dead_letter_is_edited_and_replayed(console: ConsolePage, hub: RunningHub) -> None:
    page = console.page
    console.visit("/dead")
    page.get_by_role("link", name="letters", exact=True).click()
    page.get_by_role("table", name="Causes").get_by_role("link", name="refused: no price").click()
    letter = console.row("twelve").first
    number = letter.get_by_role("link").first.inner_text()
    letter.get_by_role("link").first.click()
    payload = page.get_by_label("Payload (JSON)")
    payload.fill(payload.input_value().replace('"twelve"', "12.30000000000000000001"))
    removed = page.get_by_label("Difference of the payload")
    expect(removed.locator("del")).to_contain_text('"price": "twelve"')
    expect(removed.locator("ins")).to_contain_text('"price": 12.30000000000000000001')
    console.check()
    page.get_by_role("button", name="Save…").click()
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_label("Payload (JSON)")).to_have_value(re.compile("12.30000000000000000001"))
    page.get_by_role("button", name="Replay…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Dry run").click()
    expect(dialog).to_contain_text(f"1 letter would be sent again: {number}")
    dialog.get_by_role("button", name="Replay", exact=True).click()
    expect(dialog).to_contain_text("1 message sent again.")
    dialog.get_by_role("button", name="Close").click()
    expect(page.get_by_role("heading", name="Dead letters of letters")).to_be_visible()
    waiting = api(hub).get("/v1/queues/letters", messages=10)["messages"]
    assert [each["json"]["price"] for each in waiting] == [12.3]
    console.visit("/replays")
    expect(console.row("queue/letters/dead").first).to_contain_text("done")
    console.check()


def test_many_letters_are_replayed_at_a_rate_with_progress(
    console: ConsolePage, hub: RunningHub
) -> None:
    produce(hub, "queue/orders", *(f"late {number}" for number in range(12)))
    with (
        crosswire.connect_sync(hub.url("emp"), token=ADMINISTRATOR) as client,
        client.subscribe("queue/orders", window=12) as messages,
    ):
        for _ in range(12):
            messages.receive(timeout_s=20).refuse("too late")
    page = console.page
    console.visit("/dead/orders")
    cause = page.get_by_role("table", name="Causes").get_by_role("row").filter(has_text="too late")
    expect(cause).to_contain_text("12")
    cause.get_by_role("button", name="Replay…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Destination").fill("queue/again")
    dialog.get_by_label("Letters per second").fill("0.3")
    dialog.get_by_role("button", name="Replay", exact=True).click()
    expect(dialog.get_by_role("progressbar")).to_be_visible()
    console.check()
    dialog.get_by_role("button", name="Cancel the rest").click()
    expect(dialog).to_contain_text("Then it was cancelled.")
    dialog.get_by_role("button", name="Close").click()
    again = api(hub).get("/v1/queues/again")["length"]
    assert 0 < again < 12


def test_dead_letters_are_sorted(console: ConsolePage) -> None:
    console.visit("/dead/orders")
    table = console.page.get_by_role("table", name="Dead letters", exact=True)
    rows = table.locator("tbody tr")
    oldest = rows.first.get_attribute("data-key")
    died = table.get_by_role("columnheader", name="Died")
    expect(died).to_have_attribute("aria-sort", "ascending")
    died.get_by_role("button").click()
    expect(died).to_have_attribute("aria-sort", "descending")
    expect(rows.last).to_have_attribute("data-key", str(oldest))
    died.get_by_role("button").click()
    expect(died).to_have_attribute("aria-sort", "ascending")
    expect(rows.first).to_have_attribute("data-key", str(oldest))
    table.get_by_role("button", name="Attempts").click()
    expect(console.page).to_have_url(re.compile("sort=attempts"))
    console.check()


def test_a_message_leads_to_its_dead_letter(console: ConsolePage) -> None:
    console.visit("/messages?destination=queue/orders/dead&sort=oldest")
    accepted = console.page.get_by_role("columnheader", name="Accepted")
    expect(accepted).to_have_attribute("aria-sort", "ascending")
    console.row("queue/orders/dead").first.get_by_role("link").first.click()
    expect(console.page.locator("main h1")).to_have_text(re.compile("^Message [0-9]+$"))
    console.page.get_by_role("link", name="Edit or replay").click()
    expect(console.page.get_by_label(re.compile("^Payload"))).to_be_visible()
    console.check()


def test_a_filter_is_written_as_on_the_command_line(console: ConsolePage) -> None:
    console.visit("/messages?destination=queue/orders")
    field = console.page.get_by_label("Property filter")
    field.fill("n > 3")
    field.press("Enter")
    expect(console.page.locator("main tbody tr")).to_have_count(1)
    field.fill("n")
    field.press("Enter")
    expect(console.page.get_by_role("alert")).to_contain_text("no operator in 'n'")


def test_a_live_tail_shows_what_is_accepted(console: ConsolePage, hub: RunningHub) -> None:
    page = console.page
    console.visit("/tail")
    page.get_by_label("Destination", exact=True).fill("queue/watched")
    page.get_by_role("button", name="Watch").click()
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    produce(hub, "queue/watched", "the first", "the second")
    expect(page.locator(".tail > li")).to_have_count(2)
    expect(page.locator(".tail > li").first).to_contain_text("the second")
    page.get_by_role("button", name="Pause").click()
    produce(hub, "queue/watched", "held back")
    expect(page.get_by_text("1 held back")).to_be_visible()
    expect(page.locator(".tail > li")).to_have_count(2)
    page.get_by_role("button", name="Continue").click()
    page.locator(".tail summary").first.click()
    expect(page.get_by_label("Payload")).to_have_text("held back")
    console.check()
    assert api(hub).get("/v1/queues/watched")["length"] == 3


def test_a_queue_is_created_published_to_paused_moved_and_deleted(console: ConsolePage) -> None:
    page = console.page
    console.visit("/queues")
    page.get_by_role("button", name="Create a queue").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("made/here")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog).to_contain_text("Created")
    console.check()
    dialog.get_by_role("button", name="Close").click()
    expect(page.get_by_role("heading", name="made/here")).to_be_visible()

    page.get_by_role("button", name="Publish…").click()
    dialog.get_by_label("Payload", exact=True).fill("{no json")
    dialog.get_by_role("button", name="Publish").click()
    expect(dialog.get_by_role("alert")).to_contain_text("no JSON")
    dialog.get_by_label("Payload", exact=True).fill('{"item": "milk"}')
    dialog.get_by_role("button", name="Publish").click()
    expect(dialog).to_contain_text("It is stored as message")
    dialog.get_by_role("link").click()
    expect(page.get_by_role("heading", name="What happened")).to_be_visible()
    expect(dialog).to_have_count(0)
    page.go_back()
    expect(console.row("milk")).to_have_count(1)

    page.get_by_role("button", name="Pause…").click()
    dialog.get_by_role("button", name="Pause").click()
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator("main header").get_by_text("paused")).to_be_visible()

    page.get_by_role("button", name="Delete…").click()
    dialog.get_by_role("button", name="Delete the queue").click()
    expect(dialog.get_by_role("alert")).to_be_visible()
    dialog.get_by_role("button", name="Cancel").click()

    page.get_by_role("link", name="Waiting", exact=True).click()
    page.get_by_label("Select all on this page").check()
    page.get_by_role("button", name="Move…").last.click()
    dialog.get_by_label("Destination").fill("queue/made/there")
    dialog.get_by_role("button", name="Dry run").click()
    expect(dialog).to_contain_text("1 message would be moved.")
    dialog.get_by_role("button", name="Move", exact=True).click()
    expect(dialog).to_contain_text("1 message moved.")
    dialog.get_by_role("button", name="Close").click()
    expect(page.get_by_text("Nothing waits in this queue.")).to_be_visible()

    page.get_by_role("button", name="Delete…").click()
    dialog.get_by_role("button", name="Delete the queue").click()
    expect(dialog).to_contain_text("is deleted")
    dialog.get_by_role("button", name="Close").click()
    expect(page.get_by_role("heading", name="Queues", level=1)).to_be_visible()

    console.visit("/queues/made%2Fthere")
    page.get_by_role("button", name="Purge…").click()
    dialog.get_by_role("button", name="Delete messages").click()
    expect(dialog).to_contain_text("1 message deleted.")
    console.check()


def test_tables_are_sorted_filtered_and_paged_by_the_hub(
    console: ConsolePage, hub: RunningHub
) -> None:
    messages = [
        {"destination": f"queue/many/{number:03}", "text": "x"}
        for number in range(120)
        for _ in range(2 if number == 60 else 1)
    ]
    api(hub).post("/v1/messages", {"messages": messages})
    page = console.page
    console.visit("/queues?contains=many/")
    expect(page.locator("main tbody tr")).to_have_count(50)
    page.get_by_role("button", name="Next").click()
    expect(page.locator("main tbody tr").first).to_contain_text("many/050")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("main tbody tr")).to_have_count(20)
    page.get_by_role("button", name="Previous").click()
    expect(page.locator("main tbody tr").first).to_contain_text("many/050")
    page.reload()
    expect(page.locator("main tbody tr").first).to_contain_text("many/050")
    page.get_by_role("button", name="Messages").click()
    expect(page.locator("main tbody tr").first).to_contain_text("many/060")
    expect(page.get_by_role("columnheader", name="Messages")).to_have_attribute(
        "aria-sort", "descending"
    )
    page.go_back()
    expect(page.locator("main tbody tr").first).to_contain_text("many/050")
    console.check()


def test_the_overview_shows_rates_and_events(console: ConsolePage, hub: RunningHub) -> None:
    page = console.page
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    with crosswire.connect_sync(hub.url("emp"), token=SHOP) as client:
        client.publish("queue/shop/orders", {"item": "bread"})
        connected = page.locator(".events li").filter(has_text="connected")
        expect(connected.first).to_be_visible()
    expect(page.get_by_role("figure")).to_have_count(6)
    expect(page.get_by_role("link", name="Dead letters").first).to_be_visible()
    console.check()
