"""Programs that run in the sandbox: standard library only, for Python 3.7 and newer.

Their source is sent there. Each function returns attempt -> how it went, `ok…` where it worked.
"""
