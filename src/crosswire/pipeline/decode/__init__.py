"""From captured bytes to rows of frames, violations and directions, many connections at once.

columnar         batches of bronze.wire in, rows out; keeps open connections between them
batch_scan       one protocol's connections of a batch
scanners/        bytes to columns, compiled; decoders of `wire` for what the scanners leave
emp, emqp, …     a protocol's columns to rows of silver.frames: what a frame means
readings/        the same frame by frame
connection_rows  one connection row by row, for all that can't be read in columns
row_schema       the columns of the rows
text, json, matching, kernels, arrays, ascii_codes   what they are built from
"""
