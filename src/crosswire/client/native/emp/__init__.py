"""EMP for asyncio programs: send requests, and answer those of the other side."""

from crosswire.client.native.emp.client import EmpClient
from crosswire.client.native.emp.peer import EmpDelivery, EmpPeer, Handler, Json, OwedAnswer
from crosswire.client.native.emp.server import EmpServer

__all__ = [
    "EmpClient",
    "EmpDelivery",
    "EmpPeer",
    "EmpServer",
    "Handler",
    "Json",
    "OwedAnswer",
]
