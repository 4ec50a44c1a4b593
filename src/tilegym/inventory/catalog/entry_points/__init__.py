"""What the Solutions of the op library name as their entry points: an op with one choice of its options each."""
