"""Runs, evaluations and Episodes as web pages."""
