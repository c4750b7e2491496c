"""Sandbox backends; the file name is `sandbox.type`."""
