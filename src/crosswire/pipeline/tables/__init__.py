"""The tables, a module each: what the columns mean, and a pure function DataFrame → DataFrame."""
