"""From captured bytes to rows of frames, violations and directions, many connections at once.

columnar            batches of bronze.wire in, rows out; keeps open connections between them
batch_scan          one protocol's connections of a batch
frame_table         their frames in order, from scanner and decoders, and the rows of them
decoded_connection  the state of one connection; what only its decoders can read
scanners/           bytes to columns, compiled; decoders of `wire` for what the scanners leave
emp, emqp, …        a protocol's columns to rows of silver.frames: what a frame means
meanings/           what single values mean, and what a connection remembers between frames
row_schema          the columns of the rows
text, json, matching, kernels, arrays, ascii_codes   what they are built from
"""
