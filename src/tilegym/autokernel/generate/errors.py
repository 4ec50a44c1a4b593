"""What the generator says when it cannot serve a region."""


class Unsupported(Exception):
    """The region is none that the generator writes a kernel for; the text says which part of it, and why."""
