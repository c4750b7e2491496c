"""Engines; the file name is `engine.type`. `families/` renders chats and parses replies.

`sglang.py` launches or connects; `_sglang_pool.py` and `_sglang_server.py` keep servers alive.
"""
