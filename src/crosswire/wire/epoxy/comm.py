"""The Bond structs of Epoxy and Bond Comm.

Read and written with `crosswire.bond`, which is imported when it is first needed: configs and
messages as peers usually write them, and as we do, don't need it.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from crosswire.errors import BondDecodeError, BondError
from crosswire.wire.epoxy.layout import STOP

if TYPE_CHECKING:
    from crosswire.bond.schema import DecodeLimits, StructDef
    from crosswire.bond.values import Bonded

__all__ = [
    "Error",
    "ErrorCode",
    "decode_config",
    "decode_headers",
    "decode_protocol_error",
    "encode_protocol_error",
    "find_credentials",
    "marshal_credentials",
    "marshal_error",
    "struct",
    "unmarshal_credentials",
    "unmarshal_error",
]


class ErrorCode(IntEnum):
    """Error codes of responses: 0xA0BD0000 + n as int32."""

    INTERNAL_SERVER_ERROR = -0x5F430000
    METHOD_NOT_FOUND = -0x5F42FFFF
    INVALID_INVOCATION = -0x5F42FFFE
    TRANSPORT_ERROR = -0x5F42FFFD
    CONNECTION_SHUT_DOWN = -0x5F42FFFC
    MULTIPLE_ERRORS_OCCURRED = -0x5F42FFFB
    TIMEOUT_ERROR = -0x5F42FFFA


class Error(msgspec.Struct, frozen=True, gc=False):
    """bond.comm.Error, and the two structs derived from it: `unique_id` belongs to
    InternalServerError, `inner_errors` to AggregateError."""

    error_code: int
    message: str = ""
    inner_error: Error | None = None
    unique_id: str = ""
    inner_errors: tuple[Error, ...] = ()

    @property
    def error_name(self) -> str:
        """The name of the code, like `method-not-found`; the number, if it is an application's."""
        try:
            return ErrorCode(self.error_code).name.lower().replace("_", "-")
        except ValueError:
            return str(self.error_code)

    def fields(self) -> dict[str, Any]:
        """As `crosswire decode` prints them."""
        fields: dict[str, Any] = {"error_code": self.error_code}
        if self.message:
            fields["message"] = self.message
        if self.inner_error is not None:
            fields["inner_error"] = self.inner_error.fields()
        return fields


def struct(name: str) -> StructDef:
    """A struct of bond.comm, as the .bond file in `crosswire.bond` declares it."""
    from crosswire.bond import epoxy_module

    return epoxy_module().struct(f"bond.comm.{name}")


# ------------------------------------------------------------------------------------- framelets

_STOP: Final = bytes((STOP,))
_MAX_STRUCT_BYTES = 65536
_MAX_ERROR_BYTES = 256 * 1024


@cache
def _small() -> DecodeLimits:
    """Enough for the structs of the protocol itself and about a hundred unknown fields."""
    from crosswire.bond.schema import DecodeLimits

    return DecodeLimits(values=1024)


def _decode(content: bytes, name: str) -> Any:
    """Config, headers or protocol error. Raises BondDecodeError.

    They are small, and skipping unknown fields is slow: a large one could only be an attempt to
    use up processor time.
    """
    from crosswire.bond import fast

    if len(content) > _MAX_STRUCT_BYTES:
        raise BondDecodeError(f"{len(content)} bytes are too many for this struct", offset=0)
    return fast.decode(content, struct(name), limits=_small())


def decode_config(content: bytes) -> None:
    """Raises BondDecodeError for what is not a struct; unknown fields are ignored."""
    if not content.startswith(_STOP):
        _decode(content, "epoxy.EpoxyConfig")


def decode_headers(content: bytes) -> tuple[int, int, str, str]:
    """Conversation id, message type, service and method. Raises BondDecodeError."""
    headers = _decode(content, "epoxy.EpoxyHeaders")
    return (
        headers.conversation_id,
        int(headers.message_type),
        headers.service_name,
        headers.method_name,
    )


def decode_protocol_error(content: bytes) -> tuple[int, Error | None]:
    """Code and details. Raises BondDecodeError."""
    error = _decode(content, "epoxy.ProtocolError")
    details = error.details
    return int(error.error_code), None if details is None else _error(details.decode())


def encode_protocol_error(code: int, details: Error | None) -> bytes:
    """The content of a protocol error framelet: Fast Binary v1."""
    from crosswire.bond import fast

    declared = struct("epoxy.ProtocolError")
    return fast.encode(declared.python_class(error_code=code, details=_bonded(details)), declared)


# ------------------------------------------------------------------------------------ error data


def marshal_error(error: Error) -> bytes:
    """The error data of a response: marshalled Compact Binary v1."""
    from crosswire.bond import marshal

    value = _value(error)
    return marshal.marshal(value, value.__bond_struct__)


def unmarshal_error(data: bytes) -> Error:
    """The error in a response's error data, in any encoding. Raises BondDecodeError."""
    from crosswire.bond import marshal

    if len(data) > _MAX_ERROR_BYTES:
        raise BondDecodeError(f"{len(data)} bytes are too many for an error", offset=0)
    # Bond doesn't name structs in data: the code, which is in the base, shows which one it is.
    error = _error(marshal.unmarshal(data, struct("Error")))
    derived = _DERIVED.get(error.error_code)
    return error if derived is None else _error(marshal.unmarshal(data, struct(derived)))


_DERIVED: Final[dict[int, str]] = {
    ErrorCode.INTERNAL_SERVER_ERROR: "InternalServerError",
    ErrorCode.MULTIPLE_ERRORS_OCCURRED: "AggregateError",
}
"""The struct, derived from Error, that belongs to a code; for other codes it is Error."""


def _error(value: Any) -> Error:
    """From the value that `crosswire.bond` reads; inner errors are read as plain Error."""
    inner = value.inner_error
    return Error(
        value.error_code,
        value.message,
        None if inner is None else _error(inner.decode()),
        getattr(value, "unique_id", ""),
        tuple(_error(each.decode()) for each in getattr(value, "inner_errors", ())),
    )


def _value(error: Error) -> Any:
    """The value that `crosswire.bond` writes."""
    name = _DERIVED.get(error.error_code, "Error")
    more: dict[str, Any] = {}
    if error.unique_id:
        name, more = "InternalServerError", {"unique_id": error.unique_id}
    elif error.inner_errors:
        name = "AggregateError"
        more = {"inner_errors": [_bonded(inner) for inner in error.inner_errors]}
    return struct(name).python_class(
        error_code=error.error_code,
        message=error.message,
        inner_error=_bonded(error.inner_error),
        **more,
    )


def _bonded(error: Error | None) -> Bonded | None:
    from crosswire.bond.values import Bonded

    return None if error is None else Bonded(_value(error))


# ----------------------------------------------------------------------------------- credentials


@cache
def _credentials() -> StructDef:
    from crosswire.bond.schema import PRIMITIVES, FieldDef, StructDef

    token = FieldDef(0, "token", PRIMITIVES["string"])
    return StructDef("Credentials", namespace="crosswire").complete([token])


def marshal_credentials(token: str) -> bytes:
    """The layer data that authenticates a client with a token."""
    from crosswire.bond import marshal

    return marshal.marshal(_credentials().python_class(token=token), _credentials())


def unmarshal_credentials(layer_data: bytes) -> str:
    """The token in a message's layer data, empty if it has none. Raises BondDecodeError."""
    from crosswire.bond import marshal

    token: str = marshal.unmarshal(layer_data, _credentials()).token
    return token


def find_credentials(layer_data: bytes) -> str | None:
    """The token in layer data that is credentials and nothing else; None for other layer data.

    Bond doesn't name structs in data: credentials are recognized by their shape, one string in
    field 0, and by being written back byte for byte.
    """
    from crosswire.bond import marshal

    try:
        encoding = marshal.protocol_of(layer_data)
        found = marshal.unmarshal(layer_data, _credentials(), limits=_small())
        if marshal.marshal(found, _credentials(), protocol=encoding) != layer_data:
            return None
    except BondError:
        return None
    return found.token or None
