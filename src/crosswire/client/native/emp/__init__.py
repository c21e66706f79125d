"""EMP for asyncio programs: send requests, and answer those of the other side."""

from crosswire.client.native.emp.client import (
    EmpClient,
    EmpPeer,
    EmpServer,
    Handler,
    Json,
)

__all__ = [
    "EmpClient",
    "EmpPeer",
    "EmpServer",
    "Handler",
    "Json",
]
