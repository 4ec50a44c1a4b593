"""The Definitions and Solutions of the op library."""
