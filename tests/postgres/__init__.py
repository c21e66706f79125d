"""PostgreSQL servers that tests start themselves."""
