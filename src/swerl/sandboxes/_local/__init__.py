"""The `local` sandbox from within: spawner, warden, namespaces, files."""
