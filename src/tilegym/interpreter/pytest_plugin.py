"""Pytest plugin of the interpreter."""
