"""Clients for programs; `native` has one for each protocol."""
