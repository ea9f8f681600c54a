"""Speculative decoding: what vLLM is told, what it is measured by, and the draft that keeps learning while it serves."""
