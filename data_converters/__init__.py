"""Converters: one module per dataset. A converter turns one row into one Task.

A converter has `SOURCE` (the hub id), `SPLITS` (the first is the default) and
`to_task(row) -> Task`, which raises TaskError with a reason if the row cannot be used. It may have
`ALSO`, further hub ids with rows that it reads, `FILES`, a pattern of the hub's files if the
dataset is no table, and `with_assets(row, folder) -> row`, which adds columns from a local folder.
"""
