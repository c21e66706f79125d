"""From captured bytes to rows of frames, violations and directions, many connections at once.

frames           as a step of a Spark job
columnar         a batch of bronze.wire in, rows out; keeps what connections need between them
batch_scan       one protocol's connections of a batch
scanners/        bytes to columns, compiled; the decoders of `wire` for what they leave
emp, emqp, …     a protocol's columns to rows of silver.frames: what a frame means
readings/        the same frame by frame
connection_rows  one connection row by row, for all that can't be read in columns
text, json, matching, kernels, arrays, ascii_codes   what they are built from
"""
