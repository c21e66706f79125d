"""One adapter a protocol: how the client's verbs are said in it."""
