"""The protocol analyzer: captures and live connections as frames, fields and bytes.

For people who look at traffic, with the decoders of `wire` and the reader of `capture`, without
Spark or numba. `python -m crosswire.analyzer` reads a capture in a process of its own, within
limits of memory, time and output.
"""
