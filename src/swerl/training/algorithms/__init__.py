"""Algorithms; the file name is `algorithm.type`."""
