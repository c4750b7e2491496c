"""The ledger of sandboxes: written before each one is created, read when its owner is gone."""
