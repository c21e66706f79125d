"""Messages until they are settled: what queues and named subscriptions have in common.

backlog.py    `Backlog`: what consumers, commits and operators call; the liveness rule is there
memory.py     which messages are in memory, within which bounds, and when more are read
consumers.py  which consumer gets which message
retries.py    failed deliveries, leases, expiry: all that waits for a time
recovery.py   what was unsettled at a restart

What is settled is on disk in a `Cursor`, which the store's check and repair use, too.
"""
