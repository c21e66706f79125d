"""The tables, a file each: schema, meaning in words, and a pure function DataFrame → DataFrame."""
