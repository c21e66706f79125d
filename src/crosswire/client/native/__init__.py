"""Asyncio clients, one module a protocol, for users and for the tests."""
