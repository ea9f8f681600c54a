"""A draft for a policy, by forward-KL distillation on the policy's own samples: the frozen draft that TTS starts from.

Shapes: T tokens of one sample, A anchors (positions whose draft is trained), K draft steps, V the draft's vocabulary, H hidden.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from slipstream.core.mistakes import UserError
from slipstream.core.speculation import Speculation
from slipstream.rollout.speculation.context import Context
from slipstream.rollout.speculation.eagle3 import Eagle3Head, default_layer_ids, new_head
from slipstream.rollout.speculation.loss import draft_loss, position_weights


@dataclass(frozen=True, slots=True)
class Sample:
    """One response of the policy behind its prompt."""

    ids: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Settings:
    """``decay``: weights w_k = exp(−(k − 1) / decay) of the draft steps, as in TTS."""

    steps: int
    batch_size: int
    lr: float
    temperature: float
    tokens: int
    decay: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """A sample as the policy saw it: hidden states before its output head, and before the layers that the draft looks at."""

    ids_T: Int[Tensor, " T"]
    prompt_length: int
    final_TH: Float[Tensor, "T H"]
    features_TF: Float[Tensor, "T F"] | None


class Trainee(Protocol):
    """A draft that is learning.  ``layer_ids`` are the policy's layers that it looks at; one that ``unrolls`` feeds later steps
    with its own outputs, so that they are to be trained too."""

    layer_ids: tuple[int, ...]
    unrolls: bool
    target_ids_V: Int[Tensor, " V"]

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def drafts(self, seen: Seen, steps: int) -> tuple[Float[Tensor, "K A V"], Int[Tensor, " A"]]:
        """Logits of ``steps`` draft tokens from every anchor of a sample, where the earlier drafts were its own tokens.

        Also the position of each anchor whose *policy* distribution the first step stands for.
        """
        ...

    def save(self, folder: Path) -> None:
        """A folder that vLLM loads."""
        ...


class DraftModelTrainee:
    """A small causal language model with the policy's vocabulary.  A later step is the first step of a later anchor."""

    layer_ids: tuple[int, ...] = ()
    unrolls = False

    def __init__(self, model: Any) -> None:
        self.model = model
        self.target_ids_V = torch.arange(model.config.vocab_size)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def drafts(self, seen: Seen, steps: int) -> tuple[Tensor, Tensor]:
        anchors_A = torch.arange(seen.prompt_length - 1, len(seen.ids_T) - steps)
        logits_TV = self.model(seen.ids_T[None], use_cache=False).logits[0]
        return torch.stack([logits_TV[anchors_A + k] for k in range(steps)]), anchors_A

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


class Eagle3Trainee:
    """An EAGLE-3 head on the policy's embedding."""

    unrolls = True

    def __init__(self, head: Eagle3Head, embedding: Tensor) -> None:
        self.head, self._embedding = head, embedding.detach()
        self.layer_ids, self.target_ids_V = head.layer_ids, head.target_ids_V

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.head.parameters()

    def drafts(self, seen: Seen, steps: int) -> tuple[Tensor, Tensor]:
        """The anchor at position t has the features of t and the token t + 1; its first draft is of token t + 2."""
        assert seen.features_TF is not None
        context = Context.of_one(seen.ids_T[1:], seen.features_TF[:-1])
        anchors_A = torch.arange(seen.prompt_length - 1, len(seen.ids_T) - 1 - steps)
        drafts_AJ = seen.ids_T[anchors_A[:, None] + 2 + torch.arange(steps - 1)]
        return self.head(context, self._embedding, anchors_A, drafts_AJ).logits_KAV, anchors_A + 1

    def save(self, folder: Path) -> None:
        self.head.save(folder)


def require_trainable(speculation: Speculation, config: Any) -> None:
    """Raise UserError where ``new_trainee`` could not make that draft for a policy of that text configuration."""
    training, layers = speculation.training, config.num_hidden_layers
    if speculation.method == "eagle3":
        _features(training.features, layers)
    elif training.first_layers is not None and not training.first_layers < layers:
        raise UserError(
            f"rollout.speculation.training.first_layers: got {training.first_layers}, expected 1 to {layers - 1}: the policy "
            f"has {layers}"
        )


@torch.no_grad()
def require_plain_head(policy: Any) -> None:
    """Raise UserError for a policy whose logits are more than its last hidden states times its output head."""
    ids = torch.arange(min(8, policy.config.get_text_config().vocab_size))[None]
    plain = F.linear(policy.model(ids, use_cache=False).last_hidden_state, policy.get_output_embeddings().weight)
    if not torch.allclose(policy(ids, use_cache=False).logits, plain, rtol=1e-3, atol=1e-3):
        raise UserError(
            "draft: the policy's logits are not its hidden states times its output head (but with a bias, scale or soft cap); "
            "training a draft for such a policy is not built yet: use one that was made elsewhere"
        )


def new_trainee(speculation: Speculation, policy: Any, samples: Sequence[Sample]) -> Trainee:
    """An untrained draft for ``policy`` as ``speculation.training`` describes it.  Raises UserError where it cannot be."""
    training, config = speculation.training, policy.config.get_text_config()
    require_trainable(speculation, config)
    if speculation.method == "eagle3":
        ids = frequent_tokens(samples, config.vocab_size, training.vocabulary)
        return Eagle3Trainee(
            new_head(policy, _features(training.features, config.num_hidden_layers), ids),
            policy.get_input_embeddings().weight,
        )
    if training.first_layers is not None:
        return DraftModelTrainee(first_layers(policy, training.first_layers))
    torch.manual_seed(0)
    smaller = copy.deepcopy(policy.config)
    smaller.update(
        {
            "hidden_size": training.hidden_size,
            "intermediate_size": 4 * training.hidden_size,
            **_depth(policy.config, training.layers),
            "num_attention_heads": training.heads,
            "num_key_value_heads": training.heads,
            "head_dim": training.hidden_size // training.heads,
        }
    )
    return DraftModelTrainee(AutoModelForCausalLM.from_config(smaller, dtype=torch.float32))


def first_layers(policy: Any, count: int) -> Any:
    """A copy of the policy without its later layers."""
    config = copy.deepcopy(policy.config)
    config.update(_depth(config, count))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing = model.load_state_dict(policy.state_dict(), strict=False).missing_keys
    assert not missing, f"the policy has no {missing}"
    return model


def _depth(config: Any, count: int) -> dict[str, Any]:
    """What a configuration says of ``count`` layers: those of the policy's kinds, in its order."""
    kinds = getattr(config, "layer_types", None)
    return {"num_hidden_layers": count} | ({"layer_types": (kinds * count)[:count]} if kinds else {})


def _features(given: tuple[int, ...] | None, layers: int) -> tuple[int, ...]:
    """Layers whose inputs an EAGLE-3 head reads: an early, a middle and a late one, as vLLM's default."""
    chosen = given or default_layer_ids(layers)
    if list(chosen) != sorted({*chosen} & {*range(layers)}):
        raise UserError(
            f"rollout.speculation.training.features: got {list(chosen)}, expected three different ones of the policy's layers "
            f"0 to {layers - 1}"
        )
    return chosen


def frequent_tokens(samples: Sequence[Sample], vocabulary: int, size: int | None) -> Int[Tensor, " V"]:
    """Ids, ascending, of the ``size`` tokens that samples have most often, the lowest first where they are as frequent."""
    if size is None or size >= vocabulary:
        return torch.arange(vocabulary)
    counts = torch.bincount(torch.tensor([token for sample in samples for token in sample.ids]), minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:size].sort().values


@torch.no_grad()
def look(policy: Any, sample: Sample, layer_ids: Sequence[int]) -> Seen:
    """One forward pass of the policy (a transformers model) over a sample."""
    ids_T = torch.tensor(sample.ids)
    out = policy.model(ids_T[None], use_cache=False, output_hidden_states=bool(layer_ids))
    features = torch.cat([out.hidden_states[i][0] for i in layer_ids], dim=-1) if layer_ids else None
    return Seen(ids_T, sample.prompt_length, out.last_hidden_state[0], features)


def train(trainee: Trainee, policy: Any, seen: Sequence[Seen], settings: Settings) -> Iterator[float]:
    """Train in place, yielding each step's loss in nats: Σ_k w_k · mean KL(p ‖ q_k) / Σ_k w_k, p renormalised on the draft's
    vocabulary.  The first half of the steps trains first drafts only, the second half unrolls ``settings.tokens`` of them.
    """
    assert seen, "there is nothing to train on"
    head_VH = policy.get_output_embeddings().weight.detach()[trainee.target_ids_V]
    parameters = [p for p in trainee.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
    random, queue = Random(settings.seed), list[Seen]()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * _schedule(step, settings.steps)
        unroll = settings.tokens if trainee.unrolls and step >= settings.steps // 2 else 1
        total = 0.0
        for _ in range(settings.batch_size):
            if not queue:
                queue = random.sample(list(seen), len(seen))
            loss = _loss(trainee, queue.pop(), head_VH, unroll, settings) / settings.batch_size
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(total):
            raise FloatingPointError(f"draft training: the loss of step {step} is {total}; lower lr (got {settings.lr:g})")
        yield total


def _schedule(step: int, steps: int) -> float:
    """Share of the learning rate: a short warm-up, then a cosine down to 5 %."""
    return min(1.0, (step + 1) / 8) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


def _loss(trainee: Trainee, seen: Seen, head_VH: Tensor, unroll: int, settings: Settings) -> Tensor:
    logits_KAV, anchors_A = trainee.drafts(seen, unroll)
    ks_K = torch.arange(len(logits_KAV))
    policy_KAV = F.linear(seen.final_TH[anchors_A + ks_K[:, None]], head_VH)
    weights_KA = position_weights(ks_K + 1, settings.decay)[:, None].expand(logits_KAV.shape[:2])
    now_RV, target_RV = (logits.flatten(0, 1) / settings.temperature for logits in (logits_KAV, policy_KAV))
    return draft_loss(now_RV, target_RV, None, weights_KA.flatten(), proximal=0.0)


@torch.no_grad()
def expected_acceptance(trainee: Trainee, policy: Any, seen: Sequence[Seen], settings: Settings) -> list[float]:
    """Probability that a round accepts at least k draft tokens, for k = 1 … ``settings.tokens``: 1 + their sum is the
    acceptance length.

    Over the policy's own samples: a draft token x that the target wrote is accepted with probability min(1, q(x) / p(x)), which
    makes the product along a sample an unbiased estimate (Leviathan et al. 2023, arXiv 2211.17192).
    """
    head_VH = policy.get_output_embeddings().weight
    to_draft_W = in_draft(trainee.target_ids_V, len(head_VH))
    chances_KA = torch.cat([_chances(trainee, one, head_VH, to_draft_W, settings) for one in seen], dim=1)
    return chances_KA.cumprod(dim=0).mean(dim=1).tolist()


def _chances(trainee: Trainee, seen: Seen, head_VH: Tensor, to_draft_W: Tensor, settings: Settings) -> Float[Tensor, "K A"]:
    """Of the sample's own token being kept, at each step from each anchor."""
    logits_KAV, anchors_A = trainee.drafts(seen, settings.tokens)
    at_KA = anchors_A + torch.arange(settings.tokens)[:, None]
    tokens_KA = seen.ids_T[at_KA + 1]
    logp_TV = (F.linear(seen.final_TH[anchors_A[0] :], head_VH) / settings.temperature).log_softmax(-1)
    logp_KA = logp_TV[at_KA - anchors_A[0]].gather(-1, tokens_KA[..., None])[..., 0]
    return kept(logits_KAV / settings.temperature, tokens_KA, logp_KA, to_draft_W)


def in_draft(target_ids_V: Int[Tensor, " V"], vocabulary: int) -> Int[Tensor, " W"]:
    """The draft's id of each of the target's ``vocabulary`` tokens, −1 for those that it cannot say."""
    to_draft_W = torch.full((vocabulary,), -1)
    to_draft_W[target_ids_V] = torch.arange(len(target_ids_V))
    return to_draft_W


def kept(
    logits_KAV: Float[Tensor, "K A V"], tokens_KA: Int[Tensor, "K A"], logp_KA: Float[Tensor, "K A"], to_draft_W: Tensor
) -> Float[Tensor, "K A"]:
    """min(1, q / p) of tokens that the target wrote with log-probability ``logp_KA``; 0 for what the draft cannot say.

    ``logits_KAV`` are the draft's, at the sampling temperature; ``to_draft_W`` is of ``in_draft``.
    """
    draft_KA = to_draft_W[tokens_KA]
    logq_KA = logits_KAV.log_softmax(-1).gather(-1, draft_KA.clamp(min=0)[..., None])[..., 0]
    return torch.where(draft_KA >= 0, (logq_KA - logp_KA).exp().clamp(max=1.0), torch.zeros(()))
