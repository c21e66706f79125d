"""Filters over HTTP: as people write them, and in the hub's own form."""

from __future__ import annotations

import pytest

from crosswire.errors import CrosswireError, InvalidFilter
from crosswire.web.property_filter import property_predicate
from tests.web.conftest import WebHub, bury


@pytest.mark.parametrize("text", ["n > 1", "n>1", "n>N1", "n > 1; name = acme", "n>N1;name=Tacme"])
def test_both_forms_select_the_same(text: str) -> None:
    matches = property_predicate(text)
    assert matches is not None
    assert matches({"n": 2, "name": "acme"})
    assert not matches({"n": 1, "name": "acme"})


def test_no_filter_selects_everything() -> None:
    assert property_predicate("") is None


@pytest.mark.parametrize("text", [" ", ";", " ; "])
def test_a_filter_without_terms_does_not_select_everything(text: str) -> None:
    with pytest.raises(InvalidFilter):
        property_predicate(text)


async def test_every_operation_with_a_filter_takes_both_forms(web: WebHub) -> None:
    await web.produce("queue/a", "1", properties={"n": 1})
    (wanted,) = await web.produce("queue/a", "2", properties={"n": 2})
    await bury(web, "dies", properties={"n": 2})
    for text in ("n > 1", "n>N1"):
        found = await web.get("/v1/messages", destination="queue/a", property=text)
        assert [each["message"]["id"] for each in found["messages"]] == [wanted]
        letters = await web.get("/v1/dead/letters", queue="q", filter=text)
        assert len(letters["letters"]) == 1
        choice = {"filter": text, "dry_run": True}
        assert (await web.post("/v1/queues/a/purge", choice))["matched"] == 1
        assert (await web.post("/v1/dead/purge", {"queue": "q", **choice}))["matched"] == 1
        assert (await web.post("/v1/dead/replays", {"queue": "q", **choice}))["matched"] == 1
        move = {"destination": "queue/b", **choice}
        assert (await web.post("/v1/queues/a/move", move))["matched"] == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("price", "no operator in 'price'"),
        ("price == 10", "unknown operator '=='"),
        (" ", "a filter without terms"),
        ("n=" + "1" * 10_000, "length <= 10000"),
    ],
)
async def test_what_is_no_filter_is_refused(web: WebHub, text: str, reason: str) -> None:
    await web.produce("queue/a", "1")
    await bury(web, "dies")
    queries = [
        ("/v1/messages", {"property": text}),
        ("/v1/dead/letters", {"queue": "q", "filter": text}),
        ("/v1/tail", {"destination": "queue/a", "filter": text}),
    ]
    for path, query in queries:
        with pytest.raises(CrosswireError, match=reason):
            await web.get(path, **query)
    for path, body in [("purge", {}), ("move", {"destination": "queue/b"})]:
        with pytest.raises(CrosswireError, match=reason):
            await web.post(f"/v1/queues/a/{path}", {**body, "filter": text})
    queues = (await web.get("/v1/queues"))["queues"]
    assert [(each["name"], each["length"]) for each in queues] == [("a", 1), ("q", 0)]
