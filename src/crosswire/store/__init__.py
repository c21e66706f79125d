"""Where the hub keeps what it acknowledged."""
