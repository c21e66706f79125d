"""The process around a hub: listeners, reload, drain, metrics, feeds of lake and tap, log reads."""
