"""The reference implementations in plain PyTorch, which are also the fallback."""
