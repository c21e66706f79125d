"""Batches that many write and one commit makes visible: staged, then taken over or dropped."""
