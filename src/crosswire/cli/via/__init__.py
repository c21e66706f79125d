"""Ways to a hub: one adapter a protocol, with the same four functions."""
