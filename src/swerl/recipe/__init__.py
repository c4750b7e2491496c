"""The recipe: one TOML file that describes a run."""
