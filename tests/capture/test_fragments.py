"""IP fragments: datagrams that are whole, and those that never will be."""

from __future__ import annotations

from crosswire.capture.fragments import Fragments
from tests.pipeline.captures import fragments_v4, ipv4, tcp


def test_fragments_in_any_order_give_the_packet_as_if_never_cut() -> None:
    segment = tcp(bytes(range(256)) * 10)
    for pieces in (fragments_v4(segment, 800), fragments_v4(segment, 800)[::-1]):
        fragments = Fragments()
        *before, whole = [fragments.add(piece, 0) for piece in pieces]
        assert before == [None] * (len(pieces) - 1)
        assert whole is not None and whole[20:] == ipv4(segment)[20:]
        assert fragments.open(0) == 0


def test_a_datagram_that_is_never_whole_is_forgotten() -> None:
    fragments = Fragments()
    first, second = fragments_v4(tcp(b"x" * 1000), 800)
    assert fragments.add(first, 0) is None
    assert (fragments.open(0), fragments.open(31 * 10**9)) == (1, 0)
    assert fragments.add(second, 31 * 10**9) is None
