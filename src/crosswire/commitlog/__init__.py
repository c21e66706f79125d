"""Where a commit group becomes durable: the group, the contract of a log, and the local log."""
