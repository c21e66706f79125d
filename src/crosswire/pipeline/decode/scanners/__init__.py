"""Columnar scanners (numba), one a protocol: whole runs of captured bytes to columns."""
