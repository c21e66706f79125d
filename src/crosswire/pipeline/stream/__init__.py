"""The tables as a stream: batch by batch, each exactly once, with state carried between them."""
