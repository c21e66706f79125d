"""One adapter a protocol: the client's verbs in its words."""
