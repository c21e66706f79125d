"""The doors to the hub, one module a protocol: events to hub calls, deliveries to frames."""
