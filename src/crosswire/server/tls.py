"""TLS of the listeners: a context made from the configuration's files, anew with each reload."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from crosswire.config import TlsFiles
from crosswire.errors import ConfigError
from crosswire.gateways.certificates import TlsContext, fingerprints

__all__ = ["RenewableContext", "server_context"]


class RenewableContext(ssl.SSLContext):
    """What listeners are given for as long as they listen: each handshake that begins uses the
    context that is `current` then.

    Contexts are replaced, never changed: an authority can be added to one, but not removed, and the
    keys of session tickets stay with it, so that no session is resumed that another one began.
    """

    current: TlsContext

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Called by the event loop when it has accepted a connection."""
        return self.current.wrap_bio(*args, **options)


def server_context(files: TlsFiles) -> TlsContext:
    """A context for TLS 1.2 and later. Raises ConfigError for files that can't be used."""
    context = TlsContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.certificate, files.key)
        if files.client_ca is not None:
            # Read once: what is trusted and what is remembered of it are the same.
            pem = Path(files.client_ca).read_text(encoding="ascii", errors="replace")
            context.load_verify_locations(cadata=pem)
            context.authorities = fingerprints(pem)
            required = files.client_certificates == "required"
            context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"[tls] can't be used: {error}") from error
    return context
