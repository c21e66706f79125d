"""The server of the gateways' tests."""

from __future__ import annotations

from tests.gateways.conftest import server, start_server

__all__ = ["server", "start_server"]
