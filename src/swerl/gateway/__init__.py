"""The HTTP service between agents and engines that records exact tokens.

`server.py` listens; `conversation.py` turns a request into a recorded Turn; `history.py` finds its
branch.
"""
