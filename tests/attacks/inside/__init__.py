"""Programs that run in the sandbox: standard library only, for Python 3.7 and newer.

Their source is sent into the sandbox. Each function returns attempt -> result; `ok…` is a success.
"""
