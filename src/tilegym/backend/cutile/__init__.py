"""The cuTile backend: launching kernels, tuning them, and making them known to torch.compile."""
