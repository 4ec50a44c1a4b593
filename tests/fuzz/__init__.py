"""A differential fuzzer of all ops: ``python tests/fuzz --help``."""
