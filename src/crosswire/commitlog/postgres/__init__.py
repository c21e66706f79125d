"""The replicated log in PostgreSQL, under synchronous replication. Needs the extra `postgresql`."""
