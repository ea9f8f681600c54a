"""Speculative decoding: what vLLM is told, what it is measured by, and the draft that keeps learning while it serves.

A *round* is one verification by the target, of all running requests; ``Acceptance`` and ``draft/rounds`` count it once for each
request that had a draft.  A *draft* is the model that proposes, or its proposal for one request: up to K *draft tokens*.
"""
