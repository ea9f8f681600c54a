"""The shape annotations of the tensor functions are true: the right shapes pass them, and others do not."""

from functools import partial

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from slipstream.algos.corrections import behaviour_ratio, behaviour_weight, effective_sample_size, loglinear_proximal
from slipstream.algos.gae import gae, value_loss
from slipstream.algos.kl import kl_loss, kl_value
from slipstream.algos.logprobs import selective_logprobs
from slipstream.algos.losses import PolicyTerms, SurrogateConfig, cispo, clipped_surrogate, dppo_tv, gspo, token_cross_entropy
from slipstream.algos.reductions import reduce_to_kept
from slipstream.algos.sequences import sequence_mean, sequence_sum

THREE, FOUR = torch.zeros(3), torch.zeros(4)
IDS, MASK = torch.zeros(3, dtype=torch.int64), torch.ones(3).bool()
TERMS = PolicyTerms(logprobs_T=THREE, proximal_T=THREE, behaviour_T=THREE, advantages_T=THREE, sequence_T=IDS)
CONFIG = SurrogateConfig(clip_low=0.2, clip_high=0.2, dual_clip=None)
checked = partial(jaxtyped, typechecker=beartype)


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (selective_logprobs, [torch.zeros(3, 5), IDS], [torch.zeros(4, 5), IDS]),
        (selective_logprobs, [torch.zeros(3, 5), IDS], [torch.zeros(3, 5), THREE]),
        (partial(kl_value, estimator="k3"), [THREE, THREE], [THREE, FOUR]),
        (partial(kl_loss, estimator="k3"), [THREE, THREE], [THREE, FOUR[:1]]),  # would broadcast
        (partial(behaviour_ratio, level="token"), [THREE, THREE, IDS], [THREE, FOUR[:1], IDS]),
        (partial(behaviour_weight, level="token", cap=2.0), [THREE], [IDS]),
        (partial(loglinear_proximal, progress=0.5), [THREE, THREE, THREE], [THREE, THREE, FOUR[:1]]),
        (partial(gae, discount=1.0, trace=1.0), [THREE, THREE, MASK], [THREE, THREE, IDS]),
        (partial(value_loss, clip=0.2), [THREE, THREE, THREE], [THREE, THREE, FOUR[:1]]),
        (sequence_sum, [THREE, IDS], [THREE, THREE]),
        (sequence_mean, [THREE, IDS], [FOUR, IDS]),
        (partial(reduce_to_kept, "token_mean"), [THREE, MASK, IDS], [THREE, IDS, IDS]),
        (effective_sample_size, [THREE, MASK], [THREE, IDS]),
        (clipped_surrogate, [TERMS, CONFIG], [THREE, CONFIG]),
        (gspo, [TERMS, CONFIG], [THREE, CONFIG]),
        (cispo, [TERMS, CONFIG], [THREE, CONFIG]),
        (dppo_tv, [TERMS, CONFIG], [THREE, CONFIG]),
        (token_cross_entropy, [THREE], [torch.zeros(3, 1)]),
    ],
)
def test_shapes(function, right, wrong):
    plain, options = (function.func, function.keywords) if isinstance(function, partial) else (function, {})
    first = function.args if isinstance(function, partial) else ()
    checked(plain)(*first, *right, **options)
    with pytest.raises(TypeCheckError):
        checked(plain)(*first, *wrong, **options)
