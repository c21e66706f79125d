"""Sources of the pipeline: capture files, and the tap, messages and ledger of a hub's lake."""
