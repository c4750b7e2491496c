"""The recipe: one TOML file that describes a run. Read `schema.py` first: every setting."""
