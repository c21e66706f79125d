"""Staged batches: many tasks write parts, one commit makes all of them messages at once."""
