"""The lake: the hub's traffic, messages and ledger as Parquet files under one directory."""
