"""Converters: one module per dataset, each turning one row into one Task.

A converter has `SOURCE` (its hub id), `SPLITS` (the first is the default) and
`to_task(row) -> Task`, which raises TaskError with the reason why a row cannot be used. It may have
`FILES`, a pattern of files that the hub holds in place of a table, and
`with_assets(row, folder) -> row`, which adds what the rows lack.
"""
