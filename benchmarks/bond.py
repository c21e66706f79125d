"""How fast Bond is decoded and encoded, compared with thriftpy2 and construct.

The struct has ten fields: numbers of all widths, two texts, an enumeration, all set. thriftpy2
reads the same ten fields in Thrift's binary protocol with its pure-Python classes, construct a
description of Fast Binary with every field in place. The other tables show native helpers that were
tried, and the cost of containers and schema-less trees. The rows of a table alternate, and the best
round of each counts, so that a busy machine affects all of them alike.

    python benchmarks/bond.py [seconds for each row]
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import construct as c
import msgspec
import numba
import numpy
from measure import rate
from thriftpy2.protocol.binary import TBinaryProtocol
from thriftpy2.thrift import TPayload, TType
from thriftpy2.transport.memory import TMemoryBuffer

from crosswire.bond import compact, fast, idl, json

TURNS = 10
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0

MODULE = idl.parse(
    """
    namespace bench
    enum Side { Buy, Sell }
    struct Order
    {
        0: uint64 id;
        1: string symbol;
        2: Side side = Buy;
        3: int32 quantity;
        4: double price;
        5: bool live;
        6: int64 time;
        7: string account;
        8: uint16 venue;
        9: float fee;
    }
    struct Book { 0: vector<Order> orders; 1: map<string, double> prices; 2: vector<int32> ticks; }
    """,
    "bench.bond",
)
ORDER = MODULE.struct("bench.Order")
BOOK = MODULE.struct("bench.Book")

VALUES: dict[str, Any] = {
    "id": 123456789,
    "symbol": "ACME",
    "side": 1,
    "quantity": 500,
    "price": 101.25,
    "live": True,
    "time": 1_700_000_000_000_000,
    "account": "customer-42",
    "venue": 77,
    "fee": 0.5,
}
VALUE = ORDER.python_class(**VALUES)


# ------------------------------------------------------------------------------ the references


class ThriftOrder(TPayload):  # type: ignore[misc]
    thrift_spec = {  # noqa: RUF012 - thriftpy2's own form
        1: (TType.I64, "id", False),
        2: (TType.STRING, "symbol", False),
        3: (TType.I32, "side", False),
        4: (TType.I32, "quantity", False),
        5: (TType.DOUBLE, "price", False),
        6: (TType.BOOL, "live", False),
        7: (TType.I64, "time", False),
        8: (TType.STRING, "account", False),
        9: (TType.I16, "venue", False),
        10: (TType.DOUBLE, "fee", False),
    }
    default_spec = [(name, None) for name in VALUES]  # noqa: RUF012

    def __init__(self, **values: Any) -> None:
        for name in VALUES:
            setattr(self, name, values.get(name))


def thrift_encode(value: ThriftOrder) -> bytes:
    buffer = TMemoryBuffer()
    TBinaryProtocol(buffer).write_struct(value)
    data: bytes = buffer.getvalue()
    return data


def thrift_decode(data: bytes) -> ThriftOrder:
    value = ThriftOrder()
    TBinaryProtocol(TMemoryBuffer(data)).read_struct(value)
    return value


def described() -> c.Struct:
    """Fast Binary in construct: field heads are constants, every field is present."""
    kinds = {
        "uint64": c.Int64ul,
        "int64": c.Int64sl,
        "int32": c.Int32sl,
        "uint16": c.Int16ul,
        "double": c.Float64l,
        "float": c.Float32l,
        "bool": c.Flag,
        "string": c.PascalString(c.VarInt, "utf8"),
        "bench.Side": c.Int32sl,
    }
    parts = []
    for field in ORDER.fields:
        parts.append(c.Const(fast.FAST.field_head(field.type.wire, field.id)))
        parts.append(field.name / kinds[field.type.text])
    return c.Struct(*parts, c.Const(b"\x00"))


# ---------------------------------------------------------------------------------- the tables


def compared(title: str, rows: dict[str, Callable[[], object]], yardstick: str) -> None:
    rates = dict.fromkeys(rows, 0.0)
    for _ in range(TURNS):
        for name, work in rows.items():
            rates[name] = max(rates[name], rate(work, seconds=SECONDS / TURNS))
    print(title)
    for name, found in rates.items():
        ratio = found / rates[yardstick]
        print(f"  {name:<34}{found:>12,.0f}/s {1e6 / found:>10,.2f} µs {ratio:>7.1f} ×")


def ten_fields() -> None:
    wire = fast.encode(VALUE, ORDER)
    small = compact.encode(VALUE, ORDER)
    small2 = compact.encode(VALUE, ORDER, version=2)
    construct_order, thrift_order = described(), ThriftOrder(**VALUES)
    thrift_wire = thrift_encode(thrift_order)
    assert construct_order.parse(wire).account == VALUE.account
    assert construct_order.build(VALUES) == wire
    assert thrift_decode(thrift_wire).account == VALUE.account
    assert fast.decode(wire, ORDER) == compact.decode(small, ORDER) == VALUE
    compared(
        f"decode a struct of ten fields ({len(wire)} bytes; compact {len(small)}; "
        f"Thrift {len(thrift_wire)})",
        {
            "fast binary": lambda: fast.decode(wire, ORDER),
            "compact binary v1": lambda: compact.decode(small, ORDER),
            "compact binary v2": lambda: compact.decode(small2, ORDER, version=2),
            "thriftpy2, pure Python": lambda: thrift_decode(thrift_wire),
            "construct": lambda: construct_order.parse(wire),
        },
        "thriftpy2, pure Python",
    )
    compared(
        "encode it",
        {
            "fast binary": lambda: fast.encode(VALUE, ORDER),
            "compact binary v1": lambda: compact.encode(VALUE, ORDER),
            "compact binary v2": lambda: compact.encode(VALUE, ORDER, version=2),
            "thriftpy2, pure Python": lambda: thrift_encode(thrift_order),
            "construct": lambda: construct_order.build(VALUES),
        },
        "thriftpy2, pure Python",
    )


def native_helpers() -> None:
    """Native code that the decoder uses, and alternatives."""
    values = tuple(VALUES.values())
    make = ORDER.python_class
    compared(
        "make the object from ten values",
        {
            "msgspec.Struct (used)": lambda: make(*values),
            "slotted class, Python __init__": lambda: Slotted(*values),
        },
        "slotted class, Python __init__",
    )
    numbers = struct.pack("<6q", *range(6))
    layout, one = struct.Struct("<6q"), struct.Struct("<q")
    compared(
        "six fixed-width numbers",
        {
            "struct, one at a time (used)": lambda: [
                one.unpack_from(numbers, at)[0] for at in range(0, 48, 8)
            ],
            "struct, all at once": lambda: layout.unpack_from(numbers),
            "int.from_bytes": lambda: [
                int.from_bytes(numbers[at : at + 8], "little", signed=True)
                for at in range(0, 48, 8)
            ],
            "msgspec.msgpack, its own format": partial(
                msgspec.msgpack.decode, msgspec.msgpack.encode(list(range(6)))
            ),
        },
        "struct, one at a time (used)",
    )


class Slotted:
    """The equivalent class in plain Python."""

    __slots__ = tuple(VALUES)

    def __init__(
        self,
        id: int,  # noqa: A002
        symbol: str,
        side: int,
        quantity: int,
        price: float,
        live: bool,
        time: int,
        account: str,
        venue: int,
        fee: float,
    ) -> None:
        self.id = id
        self.symbol = symbol
        self.side = side
        self.quantity = quantity
        self.price = price
        self.live = live
        self.time = time
        self.account = account
        self.venue = venue
        self.fee = fee


@numba.njit(cache=False)  # type: ignore[untyped-decorator]
def zigzag_run(data: Any, count: int) -> Any:
    items = numpy.empty(count, numpy.int64)
    pos = 0
    for number in range(count):
        value = numpy.uint64(0)
        shift = numpy.uint64(0)
        while True:
            byte = data[pos]
            pos += 1
            value |= numpy.uint64(byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += numpy.uint64(7)
        items[number] = numpy.int64(value >> numpy.uint64(1)) ^ -numpy.int64(
            value & numpy.uint64(1)
        )
    return items


def containers() -> None:
    ticks = list(range(-500, 500))
    book = BOOK.python_class(
        orders=[VALUE] * 100, prices={f"S{each}": each / 7 for each in range(100)}, ticks=ticks
    )
    wire, small = fast.encode(book, BOOK), compact.encode(book, BOOK)
    text = json.encode(book, BOOK)
    compared(
        f"decode 100 structs, a map of 100, a list of 1000 ({len(wire):,} bytes)",
        {
            "fast binary": lambda: fast.decode(wire, BOOK),
            "compact binary v1": lambda: compact.decode(small, BOOK),
            "fast binary, as a tree": lambda: fast.decode_tree(wire),
            "simple JSON": lambda: json.decode(text, BOOK),
        },
        "fast binary",
    )
    only_ticks = compact.encode(BOOK.python_class(ticks=ticks), BOOK)
    run = numpy.frombuffer(only_ticks, numpy.uint8)[4:]
    assert zigzag_run(run, 1000).tolist() == ticks
    compared(
        "a vector<int32> of 1000 in compact binary",
        {
            "Python loop, with its struct (used)": lambda: compact.decode(only_ticks, BOOK),
            "numba, to a Python list": lambda: zigzag_run(
                numpy.frombuffer(only_ticks, numpy.uint8)[4:], 1000
            ).tolist(),
        },
        "Python loop, with its struct (used)",
    )


if __name__ == "__main__":
    ten_fields()
    native_helpers()
    containers()
