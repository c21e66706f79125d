"""Users and what they may do."""

from __future__ import annotations

import pytest

from crosswire.access import ANONYMOUS, Access, User, covers

ANNA = User(
    name="anna",
    token="a-token-of-length",
    produce=("queue/orders", "topic/ticks/#"),
    consume=("queue/+",),
)
ROOT = User(name="root", certificate="root.example", administer=True, call=("service/#",))


@pytest.mark.parametrize(
    ("pattern", "destination", "expected"),
    [
        ("queue/orders", "queue/orders", True),
        ("queue/orders", "queue/orders/dead", False),
        ("queue/orders/dead", "queue/orders", False),
        ("queue/+", "queue/orders", True),
        ("queue/+", "queue/orders/dead", False),
        ("queue/#", "queue/orders/dead", True),
        ("topic/ticks/#", "topic/ticks", True),
        ("topic/ticks/+", "topic/ticks/#", False),
        ("topic/ticks/+", "topic/ticks/+", True),
        ("topic/ticks/acme", "topic/ticks/+", False),
        ("topic/#", "topic/#", True),
        ("#", "topic/#", True),
        ("#", "queue/x", True),
        ("topic/#/x", "topic/a/x", False),
        ("+", "queue/x", False),
    ],
)
def test_a_pattern_covers_only_what_it_matches(
    pattern: str, destination: str, expected: bool
) -> None:
    assert covers(pattern, destination) is expected


def test_without_users_everybody_may_do_everything() -> None:
    access = Access()
    assert access.open
    assert access.may(ANONYMOUS, "produce", "queue/x") and access.may_administer(ANONYMOUS)


def test_with_users_a_stranger_has_no_rights() -> None:
    access = Access([ANNA])
    assert not access.may(ANONYMOUS, "produce", "queue/orders")
    assert not access.may("nobody", "produce", "queue/orders")
    assert not access.may_administer(ANONYMOUS)


def test_rights_are_for_a_deed_and_a_destination() -> None:
    access = Access([ANNA, ROOT])
    assert access.may("anna", "produce", "queue/orders")
    assert not access.may("anna", "produce", "queue/other")
    assert access.may("anna", "consume", "queue/other")
    assert not access.may("anna", "call", "service/x")
    assert access.may("root", "call", "service/x/y")
    assert access.may_administer("root") and not access.may_administer("anna")


def test_users_are_found_by_what_they_show() -> None:
    access = Access([ANNA, ROOT])
    assert access.by_token("a-token-of-length") == "anna"
    assert access.by_token("another-token-xyz") is None
    assert access.by_certificate({"cn:root.example"}) == "root"
    assert access.by_certificate({"cn:other"}) is None
    assert access.by_curve_key("other") is None


@pytest.mark.parametrize("wrong", [{"name": ""}, {"name": "x"}, {"name": "x", "token": "short"}])
def test_a_user_that_could_not_be_identified_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        User(**wrong)  # type: ignore[arg-type]


def test_a_right_to_anything_at_all() -> None:
    anna = User(name="anna", token="a-secret-of-anna", produce=("queue/orders",))
    access = Access([anna])
    assert access.may_anywhere("anna", "produce")
    assert not access.may_anywhere("anna", "serve")
    assert not access.may_anywhere(ANONYMOUS, "produce")
    assert not access.may_anywhere("removed", "produce")
    assert Access().may_anywhere(ANONYMOUS, "serve")


def test_names_of_the_hub_are_in_no_pattern() -> None:
    everything = ("#", "queue/#", "queue/+/dead", "queue/@anna.n/dead")
    anna = User(name="anna", token="a-secret-of-anna")
    bert = User(name="bert", token="a-secret-of-bert", consume=everything, produce=everything)
    chief = User(name="chief", token="a-secret-of-chief", administer=True)
    access = Access((anna, bert, chief))
    dead = "queue/@anna.n/dead"
    assert [access.may(name, "consume", dead) for name in ("anna", "bert", "chief", "")] == [
        True,
        False,
        True,
        False,
    ]
    assert not any(access.may(name, "produce", dead) for name in ("anna", "bert", "chief", ""))
    # Without an owner: of a subscription that is older than the users.
    assert not access.may("anna", "consume", "queue/@n/dead")
    assert not access.may("anna", "consume", "queue/@anna/dead")
    assert access.may("chief", "consume", "queue/@n/dead")
    assert Access().may("", "consume", dead)


def test_a_hash_is_no_token() -> None:
    """Taken for one, it would be accepted from every reader of the configuration."""
    with pytest.raises(ValueError, match="is a hash: name it token_hash"):
        User(name="anna", token="$scrypt$ln=11,r=8,p=1$c2FsdHNhbHQ$" + "x" * 43)
