"""A campaign that damages the files of stopped hubs and judges what the next start does with them.

`python -m tests.store.damage --cases 1000` runs it and prints a table. It knows the hub by what
users see of it: `crosswire serve`, EMP and HTTP, the log, exit codes, `crosswire store`.
"""
