"""A ROUTER's identities and a publisher's subscriptions."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from crosswire.wire.zmtp.routing import PrefixSubscriptions, Router


def router() -> Router[str]:
    numbers = count()
    return Router(lambda: b"%d" % next(numbers))


class TestRouter:
    def test_a_peer_is_reached_by_its_identity(self) -> None:
        routes = router()
        assert routes.join("a", b"worker") == (b"worker", None)
        assert (routes.get(b"worker"), routes.identity("a")) == ("a", b"worker")

    def test_nameless_peers_get_names_of_their_own(self) -> None:
        routes = router()
        assert routes.join("a", b"") == (b"\x000", None)
        assert routes.join("b", b"") == (b"\x001", None)
        assert (routes.get(b"\x000"), routes.get(b"\x001")) == ("a", "b")

    def test_a_made_up_name_is_never_given_twice(self) -> None:
        names = iter([b"x", b"x", b"y"])
        routes: Router[str] = Router(lambda: next(names))
        routes.join("a", b"")
        assert routes.join("b", b"") == (b"\x00y", None)

    def test_nobody_takes_a_made_up_name(self) -> None:
        routes = router()
        taken, _ = routes.join("a", b"")
        assert routes.join("thief", taken) == (b"\x001", None)
        assert routes.get(taken) == "a"

    def test_a_peer_that_comes_back_replaces_its_old_self(self) -> None:
        routes = router()
        routes.join("old", b"worker")
        assert routes.join("new", b"worker") == (b"worker", "old")
        assert routes.leave("old") is None
        assert routes.get(b"worker") == "new"

    def test_leaving(self) -> None:
        routes = router()
        routes.join("a", b"worker")
        assert routes.leave("a") == b"worker"
        assert (routes.leave("a"), routes.get(b"worker"), len(routes)) == (None, None, 0)

    def test_all_identities(self) -> None:
        routes = router()
        routes.join("a", b"x")
        routes.join("b", b"y")
        assert list(routes) == [b"x", b"y"]


topics = st.binary(max_size=3).map(lambda data: bytes(octet % 2 for octet in data))
changes = st.lists(st.tuples(st.sampled_from("+-!"), st.sampled_from("abc"), topics), max_size=30)


@given(changes, topics)
def test_subscriptions_match_as_a_plain_search_does(
    plan: list[tuple[str, str, bytes]], topic: bytes
) -> None:
    fast: PrefixSubscriptions[str] = PrefixSubscriptions()
    plain: set[tuple[str, bytes]] = set()
    for action, who, what in plan:
        if action == "+":
            fast.add(who, what)
            plain.add((who, what))
        elif action == "-":
            fast.remove(who, what)
            plain.discard((who, what))
        else:
            fast.leave(who)
            plain = {pair for pair in plain if pair[0] != who}
    found = fast.match(topic)
    assert len(found) == len(set(found))
    assert set(found) == {who for who, what in plain if topic.startswith(what)}
    assert len(fast) == len({what for _, what in plain})
    assert fast.topics("a") == {what for who, what in plain if who == "a"}
