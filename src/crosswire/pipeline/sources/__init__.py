"""Where bytes come from: capture files and the hub's own tap."""
