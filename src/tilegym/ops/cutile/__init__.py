"""The cuTile implementations: one file an op with its kernels, launch, autograd and registration."""
