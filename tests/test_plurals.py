"""Counts with their nouns."""

from __future__ import annotations

import pytest

from crosswire.plurals import noun_for, plural


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (2000, "2,000 messages")],
)
def test_a_noun_follows_its_count(count: int, text: str) -> None:
    assert plural(count, "message") == text


def test_a_noun_may_have_a_plural_of_its_own() -> None:
    assert plural(1, "delivery", "deliveries") == "1 delivery"
    assert plural(2, "delivery", "deliveries") == "2 deliveries"
    assert noun_for(0.5, "entry", "entries") == "entries"
