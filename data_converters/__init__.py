"""Converters: one module per dataset, each turning one row into one Task.

A converter has `SOURCE` (its hub id), `SPLITS` (the first is the default) and
`to_task(row) -> Task`, which raises TaskError with the reason why a row cannot be used.
"""
