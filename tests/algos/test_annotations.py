"""The shape annotations of the tensor functions are true: the right shapes pass them, and others do not."""

from functools import partial

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from slipstream.algos.corrections import behaviour_weight, effective_sample_size
from slipstream.algos.kl import kl_loss, kl_value
from slipstream.algos.logprobs import selective_logprobs
from slipstream.algos.losses import PolicyTerms, SurrogateConfig, clip_fraction, clipped_surrogate, token_cross_entropy

THREE, FOUR = torch.zeros(3), torch.zeros(4)
IDS, MASK = torch.zeros(3, dtype=torch.int64), torch.ones(3).bool()
TERMS = PolicyTerms(logprobs_T=THREE, proximal_T=THREE, behaviour_T=THREE, advantages_T=THREE)
CONFIG = SurrogateConfig(clip_low=0.2, clip_high=0.2, dual_clip=None, behaviour_cap=2.0)
checked = partial(jaxtyped, typechecker=beartype)


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (selective_logprobs, [torch.zeros(3, 5), IDS], [torch.zeros(4, 5), IDS]),
        (selective_logprobs, [torch.zeros(3, 5), IDS], [torch.zeros(3, 5), THREE]),
        (partial(kl_value, estimator="k3"), [THREE, THREE], [THREE, FOUR]),
        (partial(kl_loss, estimator="k3"), [THREE, THREE], [THREE, FOUR[:1]]),  # would broadcast
        (partial(behaviour_weight, cap=2.0), [THREE, THREE], [THREE, FOUR[:1]]),
        (effective_sample_size, [THREE, MASK], [THREE, IDS]),
        (clipped_surrogate, [TERMS, CONFIG], [THREE, CONFIG]),
        (clip_fraction, [TERMS, CONFIG], [THREE, CONFIG]),
        (token_cross_entropy, [THREE], [torch.zeros(3, 1)]),
    ],
)
def test_shapes(function, right, wrong):
    plain, options = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    checked(plain)(*right, **options)
    with pytest.raises(TypeCheckError):
        checked(plain)(*wrong, **options)
