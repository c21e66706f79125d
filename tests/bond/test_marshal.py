"""Magic and version in front of a struct."""

from __future__ import annotations

import pytest

from crosswire.bond import fast, marshal
from crosswire.errors import BondDecodeError

from .samples import struct

PARAMS = struct("examples.calc.Params")
VALUE = PARAMS.python_class(x=1, y=2)
PROTOCOLS = {
    "4d460100": marshal.FAST_V1,
    "43420100": marshal.COMPACT_V1,
    "43420200": marshal.COMPACT_V2,
}


@pytest.mark.parametrize("magic", sorted(PROTOCOLS))
def test_the_magic_identifies_the_encoding(magic: str) -> None:
    data = marshal.marshal(VALUE, PARAMS, protocol=PROTOCOLS[magic])
    assert data[:4].hex() == magic
    assert marshal.protocol_of(data) is PROTOCOLS[magic]
    assert marshal.unmarshal(data, PARAMS) == VALUE
    assert marshal.unmarshal(memoryview(data), PARAMS) == VALUE
    assert marshal.unmarshal_tree(data).find(2) == 2


def test_compact_v1_is_the_default() -> None:
    assert marshal.marshal(VALUE, PARAMS).hex() == "434201003002500400"


@pytest.mark.parametrize("source", sorted(PROTOCOLS))
@pytest.mark.parametrize("target", sorted(PROTOCOLS))
def test_transcodes_without_a_schema(source: str, target: str) -> None:
    data = marshal.marshal(VALUE, PARAMS, protocol=PROTOCOLS[source])
    expected = marshal.marshal(VALUE, PARAMS, protocol=PROTOCOLS[target])
    assert marshal.transcode(data, protocol=PROTOCOLS[target]) == expected


@pytest.mark.parametrize(
    "data", [b"", b"CB", b"CB\x03\x00\x00", b"MF\x02\x00\x00", b"SP\x01\x00\x00", b"{}"]
)
def test_other_magic_is_refused(data: bytes) -> None:
    with pytest.raises(BondDecodeError, match="not marshalled Bond"):
        marshal.unmarshal(data, PARAMS)
    with pytest.raises(BondDecodeError, match="not marshalled Bond"):
        marshal.unmarshal_tree(data)


def test_a_magic_alone_is_refused() -> None:
    with pytest.raises(BondDecodeError, match="ends in the middle"):
        marshal.unmarshal(fast.FAST.magic, PARAMS)
