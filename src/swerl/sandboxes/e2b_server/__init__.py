"""A server that speaks E2B's protocols over any SandboxBackend.

`app.Server` listens; `control` answers the REST calls that make and remove sandboxes; `envd`
answers what E2B's agent inside a sandbox would: processes, files, folders.
"""
