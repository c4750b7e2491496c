"""The `local` sandbox implementation: spawner, supervisor, namespaces, files."""
