"""Hubs in processes of their own, as replicas of one log in PostgreSQL."""
