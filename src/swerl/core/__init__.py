"""Pure data, errors, contracts and plug-ins, which every other room may import.

Read `contracts.py` first: the Protocols between all parts.
"""
