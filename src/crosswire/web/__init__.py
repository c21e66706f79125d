"""The hub over HTTP: API, metrics, and their listener with its access checks."""
