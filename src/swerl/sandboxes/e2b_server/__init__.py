"""A server that speaks E2B's protocols over any SandboxBackend.

`app.SandboxServer` listens and routes. `control` answers the REST calls that create and remove
sandboxes. `envd` answers in place of E2B's agent inside a sandbox: processes, files, folders.
"""
