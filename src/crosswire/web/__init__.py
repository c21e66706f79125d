"""The hub over HTTP: its API, its metrics, and the door they stand behind."""
