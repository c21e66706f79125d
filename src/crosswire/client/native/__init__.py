"""Asyncio clients that speak one protocol each; a package a protocol."""
