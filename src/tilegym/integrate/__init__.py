"""From a model's name to a verified patch: what it computes, which kernels fit, and whether they compute the same."""
