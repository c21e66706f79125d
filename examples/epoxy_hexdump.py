"""Hex dumps of the Epoxy specification's example, which it leaves out, byte by byte.

python examples/epoxy_hexdump.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosswire.bond import epoxy_module, idl, marshal
from crosswire.bond.dialect import Dialect
from crosswire.bond.schema import DataType, StructDef
from crosswire.wire.epoxy.frames import ConfigFrame, Message, MessageType, serialize

module = idl.load(Path(__file__).with_name("calc.bond"))
PARAMS = module.struct("examples.calc.Params")
RESULT = module.struct("examples.calc.Result")
CONFIG = epoxy_module().struct("bond.comm.epoxy.EpoxyConfig")
HEADERS = epoxy_module().struct("bond.comm.epoxy.EpoxyHeaders")
MUL = 3
FRAMELETS = {b"CG": "config", b"HR": "headers", b"PD": "payload"}
ENCODINGS = {b"MF": "Fast Binary", b"CB": "Compact Binary"}

Piece = tuple[int, str]
"""Number of bytes, and their meaning."""


def frames() -> Iterator[tuple[str, bytes, StructDef]]:
    """Title, bytes and the struct in the last framelet, of the handshake and the example."""
    params = PARAMS.python_class(x=67, y=87, operation=MUL)
    request = Message(
        3,
        MessageType.REQUEST,
        "examples.calc.Calc",
        "Calculate",
        payload=marshal.marshal(params, PARAMS),
    )
    result = marshal.marshal(RESULT.python_class(z=5829), RESULT)
    response = Message(3, MessageType.RESPONSE, payload=result)
    yield "The config frame, from both sides", serialize(ConfigFrame()), CONFIG
    yield "The request frame", serialize(request), PARAMS
    yield "The response frame", serialize(response), RESULT


def hexdump(data: bytes) -> Iterator[str]:
    """Sixteen bytes a line: offset, hex, ASCII."""
    for offset in range(0, len(data), 16):
        row = data[offset : offset + 16]
        pairs = " ".join(row[index : index + 2].hex() for index in range(0, len(row), 2))
        text = "".join(chr(octet) if 32 <= octet < 127 else "." for octet in row)
        yield f"{offset:08x}: {pairs:<39}  {text}"


def explain(data: bytes, last: StructDef) -> Iterator[Piece]:
    """The meaning of a frame's bytes, piece by piece."""
    count = int.from_bytes(data[:2], "little")
    yield 2, f"framelets: {count}"
    position = 2
    for _ in range(count):
        kind = data[position : position + 2]
        size = int.from_bytes(data[position + 2 : position + 6], "little")
        content = data[position + 6 : position + 6 + size]
        yield 2, f"framelet type {kind.decode()}: {FRAMELETS[kind]}"
        yield 4, f"size of the content: {size}"
        if kind == b"PD":
            dialect = marshal.protocol_of(content)
            yield 2, f"magic: {ENCODINGS[content[:2]]}"
            yield 2, f"version {int.from_bytes(content[2:4], 'little')}"
            yield from explain_struct(content[4:], last, dialect)
        else:
            yield from explain_struct(
                content, CONFIG if kind == b"CG" else HEADERS, marshal.FAST_V1
            )
        position += 6 + size


def explain_struct(data: bytes, struct: StructDef, dialect: Dialect) -> Iterator[Piece]:
    """The fields of a struct that has neither a base nor structs in it."""
    names = {field.id: field for field in struct.fields}
    value = marshal.unmarshal(dialect.magic + data, struct)
    position = 0
    while True:
        tag, identifier, after = dialect.read_field_head(data, position)
        if tag == DataType.STOP:
            yield 1, f"end of {struct.name}"
            return
        yield after - position, f"field {identifier}, {DataType(tag).name.lower()}"
        position = dialect.skip(data, after, len(data), tag, 1, [len(data)])
        name = names[identifier].python_name
        yield position - after, f"{name}: {shown(getattr(value, name))}"


def shown(value: Any) -> str:
    return f"{int(value)} ({value.name})" if hasattr(value, "name") else repr(value)


def page() -> str:
    """The dumps in Markdown, as docs/protocols/epoxy.md has them."""
    lines = []
    for title, data, last in frames():
        lines += [f"{title}, {len(data)} bytes:", "", "```"]
        lines += hexdump(data)
        lines += ["```", "", "| offset | bytes | meaning |", "|---|---|---|"]
        offset = 0
        for size, words in explain(data, last):
            octets = data[offset : offset + size].hex(" ")
            lines.append(f"| {offset:02x} | `{octets}` | {words} |")
            offset += size
        assert offset == len(data)
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
