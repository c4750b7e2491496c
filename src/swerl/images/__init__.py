"""Task images: the store on disk, registries, pulling, mirroring, building.

Read `store.py` first; `ondemand.py` pulls an image at its first use.
"""
