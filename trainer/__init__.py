"""The learner: model loading, packing, the DeepSpeed step, checkpoints and the weights' way out.

One process per rank, and no Ray: an actor of ``cluster`` wraps ``learner.Learner``.
"""
