"""The hub: queues, topics, services, schedules and their ledger, without a socket in sight."""
