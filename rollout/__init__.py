"""Rollouts: the vLLM engine, weights on their way into it, environments and rewards."""
