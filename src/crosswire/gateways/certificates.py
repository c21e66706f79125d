"""Client certificates: the names in them, and the authorities that vouch for them."""

from __future__ import annotations

import asyncio
import hashlib
import re
import ssl
from collections.abc import Iterator
from typing import Any, Final

import msgspec

__all__ = ["PeerCertificate", "TlsContext", "fingerprints", "read_certificate"]

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----")
_ALTERNATIVES: Final = {"DNS": "dns", "URI": "uri", "email": "email"}
"""Kinds of alternative names that can identify a user, as Python and as the configuration call
them."""


class TlsContext(ssl.SSLContext):
    """A context of a server that knows the fingerprints of the authorities it accepts."""

    authorities: frozenset[bytes] = frozenset()


class PeerCertificate(msgspec.Struct, frozen=True):
    """A certificate that was verified in a handshake.

    `names` have their kind in front: `cn:anna`, `dns:anna.example.org`. `authorities` are the
    fingerprints of those that it depends on: it is valid for as long as the hub accepts them all.
    """

    names: frozenset[str]
    authorities: frozenset[bytes]


def fingerprints(pem: str) -> frozenset[bytes]:
    """The SHA-256 of each certificate in a PEM file. Raises ValueError for one that is damaged."""
    return frozenset(_fingerprint(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(pem))


def read_certificate(transport: asyncio.BaseTransport) -> PeerCertificate | None:
    """The verified certificate of a connection's peer; None if it has none."""
    certificate: dict[str, Any] | None = transport.get_extra_info("peercert")
    if not certificate:
        return None
    authorities = _authorities(transport.get_extra_info("ssl_object"))
    return PeerCertificate(frozenset(_names(certificate)), authorities)


def _names(certificate: dict[str, Any]) -> Iterator[str]:
    common = [
        str(value)
        for part in certificate.get("subject", ())
        for kind, value in part
        if kind == "commonName"
    ]
    # Which of two would be the user? Programs differ in that: none of them.
    if len(common) == 1:
        yield f"cn:{common[0]}"
    for kind, value in certificate.get("subjectAltName", ()):
        if kind in _ALTERNATIVES:
            name = _ALTERNATIVES[kind]
            yield f"{name}:{value.lower() if name == 'dns' else value}"


def _authorities(connection: ssl.SSLObject) -> frozenset[bytes]:
    chain = _verified_chain(connection)
    if chain:
        return frozenset((_fingerprint(chain[-1]),))
    # A resumed session has no chain. It was made with the same context, since the keys of tickets
    # belong to that: one of its authorities vouches for the certificate, unknown which.
    context = connection.context
    return context.authorities if isinstance(context, TlsContext) else frozenset()


def _verified_chain(connection: ssl.SSLObject) -> list[bytes]:
    """From the peer's certificate to that of the authority, in DER."""
    if hasattr(connection, "get_verified_chain"):  # Python 3.13
        chain: list[bytes] = connection.get_verified_chain()
        return chain
    inner: Any = connection._sslobj  # type: ignore[attr-defined]
    return [
        ssl.PEM_cert_to_DER_cert(each.public_bytes()) for each in inner.get_verified_chain() or ()
    ]


def _fingerprint(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()
