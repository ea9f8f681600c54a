"""Pure tensor mathematics: log-probabilities, KL, advantages, corrections, losses and reductions.

Functions of tensors and plain lists, with no state, device or process inside.  Losses come out per token, unreduced and
unmasked; ``reductions`` gives the weights and the one global denominator that make a scalar of them.
"""
