"""Sandbox backends; the file name is `sandbox.type`.

`ledger.py` records every sandbox before it starts; `e2b_server/` serves sandboxes to E2B's SDK.
"""
