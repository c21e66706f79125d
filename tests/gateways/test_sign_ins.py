"""Failed sign-ins: what counts as one address, and when tokens are compared with hashes."""

from __future__ import annotations

import pytest

from crosswire.access import Access, User
from crosswire.gateways.sign_ins import SignIns
from crosswire.listeners import network_of
from crosswire.tokens import hash_token

HERE, THERE = "192.0.2.1", "192.0.2.2"


@pytest.mark.parametrize(
    ("host", "network"),
    [
        (HERE, HERE),
        ("::ffff:192.0.2.1", HERE),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1:2:3", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("", ""),
        ("localhost", "localhost"),
    ],
)
def test_what_is_one_address(host: str, network: str) -> None:
    assert network_of(host) == network


def test_failures_of_one_address_delay_no_other() -> None:
    sign_ins = SignIns()
    delays = [sign_ins.fail(HERE, 100.0) for _ in range(20)]
    assert delays[:3] == [0.0] * 3 and delays[-1] == 5.0 and delays == sorted(delays)
    assert sign_ins.fail(THERE, 100.0) == 0.0
    assert sign_ins.fail("2001:db8::1", 100.0) == 0.0
    assert sign_ins.failures("2001:db8::2") == 1


def test_comparisons_are_limited_after_many_failures_of_the_same_address() -> None:
    sign_ins = SignIns()
    for _ in range(32):
        assert sign_ins.may_compare(HERE, 100.0)
        sign_ins.fail(HERE, 100.0)
    allowed = [sign_ins.may_compare(HERE, 100.0 + step / 1000) for step in range(1000)]
    assert 45 <= sum(allowed) <= 50
    assert sign_ins.may_compare(THERE, 100.0)
    assert sign_ins.may_compare(HERE, 1000.0), "forgotten"


def test_a_token_that_was_valid_before_is_not_compared_again() -> None:
    token = "a token of anna that is hashed"
    access = Access((User(name="anna", token_hash=str(hash_token(token))),))

    def never() -> bool:
        raise AssertionError("it is compared")

    with pytest.raises(AssertionError):
        access.by_token(token, never)
    assert access.by_token(token) == "anna"
    assert access.by_token(token, never) == "anna"
