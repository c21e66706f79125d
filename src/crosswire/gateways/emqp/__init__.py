"""eMQP on the hub: events to hub calls, deliveries to frames."""
