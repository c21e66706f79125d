"""Where the servers of a log are: a URL as PostgreSQL's own programs take it, and what we demand.

    postgresql://ROLE@HOST[:PORT][,HOST[:PORT]…]/DATABASE[?schema=NAME&sslrootcert=FILE&passfile=FILE…]

`schema` (default `crosswire`) is ours, so that several hubs can use one database. All else is
libpq's, PGPASSWORD, PGPASSFILE and the other variables of the environment included.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from crosswire.errors import ConfigError

__all__ = ["LogAddress", "ServerAddress", "parse_address"]

_CONNECT_S: Final = 5
_SCHEMA_LETTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")


class ServerAddress(msgspec.Struct, frozen=True):
    """One server, and libpq's parameters for it. `name` is HOST:PORT, for people."""

    name: str
    parameters: dict[str, Any]


class LogAddress(msgspec.Struct, frozen=True):
    """The servers of a log, in the order in which they are tried."""

    servers: tuple[ServerAddress, ...]
    schema: str


def parse_address(url: str, *, application: str = "crosswire", role: str = "") -> LogAddress:
    """Read the URL of a log; `role` replaces the one that it names.

    Raises ConfigError; its text never has what a password could be.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        raise ConfigError("the address of the log has to begin with postgresql://")
    try:
        parts = urlsplit(url)
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        schema = dict(query).get("schema", "crosswire")
        rest = urlencode([each for each in query if each[0] != "schema"])
        parameters = conninfo_to_dict(urlunsplit(parts._replace(query=rest)))
    except (ValueError, ProgrammingError):
        # The cause quotes the address, and with it what may be a password.
        raise ConfigError(
            "the address of the log can't be read; it looks like "
            "postgresql://ROLE@HOST1,HOST2/DATABASE?sslrootcert=FILE"
        ) from None
    if not schema or len(schema) > 40 or not set(schema) <= _SCHEMA_LETTERS:
        raise ConfigError("the schema of the log may have letters a to z, digits and _")
    if "password" in parameters:
        raise ConfigError(
            "the address of the log contains a password: put it into a file and add "
            "passfile=FILE (a line HOST:PORT:DATABASE:ROLE:PASSWORD), or set PGPASSWORD"
        )
    for name in ("service", "target_session_attrs", "options", "hostaddr"):
        if name in parameters:
            raise ConfigError(f"the address of the log can't have {name}")
    if role:
        parameters["user"] = role
    hosts = str(parameters.pop("host", "") or "").split(",")
    if not all(hosts):
        raise ConfigError("the address of the log needs a host")
    ports = str(parameters.pop("port", "") or "5432").split(",")
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) != len(hosts):
        raise ConfigError("the address of the log has not as many ports as hosts")
    if not all(not port or (port.isdecimal() and 0 < int(port) < 65536) for port in ports):
        raise ConfigError("a port in the address of the log is not a number from 1 to 65535")
    servers = []
    for host, port in zip(hosts, ports, strict=True):
        own: dict[str, Any] = {
            # First: what follows is what the log depends on.
            **parameters,
            "host": host,
            "port": port or "5432",
            "application_name": application,
            # Not `read-write`: that a database is read-only is a fault of its own, which is
            # reported as such, and not a reason to look for another server.
            "target_session_attrs": "primary",
            "connect_timeout": _CONNECT_S,
            "keepalives": 1,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 10_000,
            "client_encoding": "UTF8",
        }
        if not _is_loopback(host):
            own.update(_verified(host, own))
        servers.append(ServerAddress(f"{host}:{own['port']}", own))
    return LogAddress(tuple(servers), schema)


def _is_loopback(host: str) -> bool:
    if host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _verified(host: str, parameters: dict[str, Any]) -> dict[str, str]:
    """Records have payloads in them: the server's certificate and name are always verified."""
    if parameters.get("sslmode", "verify-full") != "verify-full":
        raise ConfigError(
            f"the connection to {host} has to verify the server's name: use sslmode=verify-full, "
            f"with sslrootcert=FILE if its authority is your own"
        )
    return {
        "sslmode": "verify-full",
        "sslrootcert": str(parameters.get("sslrootcert", "system")),
        "gssencmode": "disable",
    }
