"""The ``algo`` section of a recipe: what ``algo.name`` presets, every part that can be set, and the rules between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from slipstream.core.optimizer import CriticOptimizer
from slipstream.core.section import Fraction, NonNegative, Positive, Problems, Rate, Section

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "reduction": "constant"},
    "dapo": {"clip_high": 0.28, "overlong": {"filter": True, "soft": 0.2}},
    "rloo": {"advantage": "rloo"},
    "reinforce": {"advantage": "reinforce"},
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline"},
    "gspo": {
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "reduction": "sequence_mean",
        "correction": {"weight": "geometric"},
        "minibatches": 4,
    },
    "cispo": {"loss": "cispo", "clip_low": None, "clip_high": 4.0},
    "dppo": {"loss": "dppo_tv"},
    "ppo": {"advantage": "gae", "critic": {}, "kl": {"placement": "reward", "estimator": "k1"}},
    "opd": {"advantage": "none"},
    "sft": {},
}
"""What a name sets differently from the defaults below; docs/algorithms.md has the sources.  The recipe's own keys win."""
OF_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""Advantages that compare siblings: a group of equal rewards, or of one, gives them nothing."""
OF_BATCH = ("reinforce", "reinforce_pp")
"""Advantages that compare the responses of a batch."""

_NEEDS_RECOMPUTE = {
    "correction.reject": {
        "loglinear": "it decides on fixed log-probs before the first step, and loglinear has none",
        "behaviour": "it looks at π_prox/π_b, which is 1 throughout",
    },
    "max_inner_kl": {
        "loglinear": "its π_prox moves with the policy and hides the drift",
        "behaviour": "the lag would count as drift",
    },
}
"""Why a key does not go with another π_prox than the learner's at the start of the batch."""


class KL(Section):
    """KL to the reference.  ``reward``: k1, subtracted from the reward.  ``loss``: k2, or k3's value with k2's gradient."""

    coefficient: Annotated[float, Field(ge=0.0)] = Field(0.0, description="what the KL is multiplied with; 0: no reference")
    placement: Literal["loss", "reward"] = Field("loss", description="where it is charged")
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="how it is estimated from sampled tokens (docs/algorithms.md)"
    )
    importance: bool = Field(
        True, description="in the loss: weigh each token by π_θ/π_b, truncated, as its KL is that of the current policy"
    )
    refresh_every: Positive | None = Field(
        None, description="steps after which the policy becomes the new reference; default: the reference stays"
    )
    target: Rate | None = Field(
        None,
        description="in the reward: adapt the coefficient to hold the KL at so many nats per response; default: fixed",
    )
    horizon: Positive = Field(10_000, description="responses over which an adaptive coefficient may change by a fifth")

    @model_validator(mode="after")
    def _gradient_is_right(self) -> KL:
        if self.coefficient and self.placement == "loss" and self.estimator == "k1":
            raise ValueError("estimator: k1 in the loss has zero expected gradient; use k2 or k3, or placement: reward")
        if self.coefficient and self.placement == "reward" and self.estimator != "k1":
            raise ValueError(f"estimator: {self.estimator} in the reward is biased; use k1, or placement: loss")
        if self.refresh_every and not self.coefficient:
            raise ValueError("refresh_every: there is no reference without a KL term; give a coefficient or remove the key")
        return self


class GAE(Section):
    """Generalised advantage estimation, for ``advantage: gae``; over the tokens that the policy wrote, see algos/gae.py."""

    gamma: Fraction = Field(1.0, description="discount per token")
    lam: Fraction = Field(0.95, description="λ: 1 is the rewards to come less the value, 0 the error of one step")
    whiten: bool = Field(True, description="advantages to mean 0 and deviation 1, over the trained tokens of the batch")


class Critic(Section):
    """The value model of ``advantage: gae``, with an optimizer of its own and the trainer's ZeRO stage and packing."""

    path: str | None = Field(
        None,
        description="as model.path, of the policy's tokenizer; default: the policy as it is before its first RL step. A model "
        "without value head gets one of zeros",
    )
    optimizer: CriticOptimizer = Field(default_factory=CriticOptimizer)
    clip: Rate | None = Field(
        0.2, description="how far a value may move within a batch until its loss has no gradient; null: no limit"
    )
    warmup_batches: NonNegative = Field(0, description="first batches, which train the critic and leave the policy as it is")


class Band(Section):
    """Ratios from ``low`` to ``high`` are kept."""

    low: Annotated[float, Field(ge=0.0)] = Field(description="smallest ratio that is kept, below 1")
    high: Rate = Field(description="largest ratio that is kept, above 1")

    @model_validator(mode="after")
    def _is_a_band_around_one(self) -> Band:
        if not self.low < 1 < self.high:
            raise ValueError(f"low: got a band from {self.low:g} to {self.high:g}, expected low < 1 < high: on-policy is 1")
        return self


class Correction(Section):
    """For tokens of another policy than the learner's: a weight π_prox/π_b, and what is left out.  Each is applied once.

    ``weight``: the ratio per token, the product over the sequence, its geometric mean, or no correction.  ``reject``: tokens
    outside the band ``icepop``, sequences whose geometric mean is outside ``geometric``, and (``opsm``) tokens of negative
    advantage in sequences with mean log π_b/π_prox above ``opsm_delta``.  What is rejected leaves the denominator too.
    """

    weight: Literal["none", "token", "sequence", "geometric"] = Field("token", description="which ratio weighs a token's loss")
    cap: Annotated[float, Field(ge=1.0)] | None = Field(2.0, description="truncation of the weight; null: as large as it is")
    reject: list[Literal["icepop", "geometric", "opsm"]] = Field(
        default_factory=list, description="any of them costs a forward pass before each batch"
    )
    icepop: Band = Field(default_factory=lambda: Band(low=0.5, high=5.0), description="{low: 0.5, high: 5.0}")
    geometric: Band = Field(default_factory=lambda: Band(low=0.99, high=1.01), description="{low: 0.99, high: 1.01}")
    opsm_delta: Annotated[float, Field(ge=0.0)] = Field(1e-4, description="nats per token")


class Overlong(Section):
    """Responses that are cut off, or come close to the most that they may have (DAPO)."""

    filter: bool = Field(False, description="they get no loss weight; their rewards still count in the group's statistics")
    soft: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None, description="share of the limit (max_tokens × turns, or the context) over which the reward falls by 1"
    )


class Algo(Section):
    """The learning rule.  ``name`` presets the other keys; each of them can be set.  ``sft`` trains on demonstrations only,
    ``opd`` on a teacher (section ``distill``)."""

    name: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gspo",
        "cispo",
        "dppo",
        "ppo",
        "opd",
        "sft",
    ] = Field("grpo", description="what the other keys of this section are where the recipe does not set them")
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "gae", "none"] = Field(
        "grpo",
        description="what is subtracted from a reward, and what it is divided by; gae: per token, from a critic's values; "
        "none: rewards train nothing",
    )
    gae: GAE = Field(default_factory=GAE)
    critic: Critic | None = Field(None, description="for advantage gae, and only there; `{}` is a critic with these defaults")
    loss: Literal["clipped_surrogate", "gspo", "cispo", "dppo_tv"] = Field(
        "clipped_surrogate", description="how ratio and advantage make a token's loss (docs/algorithms.md)"
    )
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        0.2, description="below 1, of the ratio (dppo_tv: of the probability); null: no lower clip, for cispo only"
    )
    clip_high: Rate = Field(0.2, description="above 1, of the ratio (dppo_tv: of the probability, at most 1)")
    dual_clip: Annotated[float, Field(gt=1.0)] | None = Field(
        None, description="bound on the ratio of a negative advantage (clipped_surrogate, gspo)"
    )
    correction: Correction = Field(default_factory=Correction)
    proximal: Literal["recompute", "loglinear", "behaviour"] = Field(
        "recompute",
        description="recompute: a forward pass before a batch of several steps; loglinear: from π_b, π_θ and the lag; "
        "behaviour: π_b itself, as before decoupling (needs correction.weight none)",
    )
    reduction: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean",
        description="mean over all tokens; over responses, of their means; constant: sum over the most tokens they may have",
    )
    kl: KL = Field(default_factory=KL)
    epochs: Positive = Field(1, description="passes over each batch")
    minibatches: Positive = Field(1, description="optimizer steps per pass")
    max_inner_kl: Rate | None = Field(
        None, description="nats: beyond this mean KL(π_prox ‖ π_θ) of a mini-batch, the batch gets no further steps"
    )
    overlong: Overlong = Field(default_factory=Overlong)

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, written: Any) -> Any:
        """What the recipe says, over what its ``name`` presets."""
        if not isinstance(written, Mapping):
            return written
        name = written.get("name", "grpo")
        return _over(PRESETS.get(name, {}) if isinstance(name, str) else {}, written)

    @property
    def kl_in_reward(self) -> bool:
        return self.kl.coefficient > 0 and self.kl.placement == "reward"

    @property
    def inner_steps(self) -> int:
        return self.epochs * self.minibatches

    def problems(self) -> Problems:
        """Rules between the keys of this section; all that are broken."""
        found: Problems = []
        if self.loss == "gspo" and self.reduction != "sequence_mean":
            got = f"got {self.reduction}, expected sequence_mean with loss gspo"
            found.append(("algo.reduction", f"{got}: its ratio is the sequence's, others would weigh it by length"))
        if self.loss != "cispo" and self.clip_low is None:
            found.append(("algo.clip_low", f"got null, expected a number with loss {self.loss}; only cispo does without"))
        if self.loss == "dppo_tv" and self.clip_high > 1:
            why = "it bounds a difference of two probabilities, which is never larger"
            found.append(("algo.clip_high", f"got {self.clip_high:g}, expected at most 1 with loss dppo_tv: {why}"))
        if self.dual_clip is not None and self.loss in ("cispo", "dppo_tv"):
            found.append(("algo.dual_clip", f"loss {self.loss} has no dual clip; remove it"))
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            limit = f"1 + algo.clip_high = {1 + self.clip_high:g}"
            found.append(("algo.dual_clip", f"got {self.dual_clip:g}, expected more than {limit}"))
        if self.max_inner_kl is not None and self.inner_steps == 1:
            found.append(
                ("algo.max_inner_kl", "there is one step per batch, and nothing to stop; raise algo.epochs or remove it")
            )
        found += self._proximal_problems()
        if self.name == "sft" and self.correction != Correction():
            why = "demonstrations have no log-probs of a sampler to correct for"
            found.append(("algo.correction", f"does not go with algo.name sft: {why}; remove it"))
        if self.name == "sft" and self.kl.coefficient:
            found.append(("algo.kl.coefficient", "sft has no RL stream for a KL term; remove it"))
        return found + self._kl_problems() + self._critic_problems()

    def _kl_problems(self) -> Problems:
        """Rules of an adaptive coefficient."""
        found: Problems = []
        if self.kl.target is not None and not self.kl.coefficient:
            found.append(("algo.kl.coefficient", "got 0 with algo.kl.target, expected a number to start from"))
        if self.kl.target is not None and self.kl.placement == "loss":
            why = "the coefficient adapts to what the rewards are charged; use placement: reward, or remove target"
            found.append(("algo.kl.target", f"does not go with algo.kl.placement: loss: {why}"))
        return found

    def _critic_problems(self) -> Problems:
        """Rules of GAE: who uses a critic has one, and nothing is set for a critic that is not there."""
        found: Problems = []
        if self.name == "sft":
            if self.critic is not None or self.advantage == "gae":
                found.append(("algo.critic", "sft has no rewards for a critic to predict; remove it, and algo.advantage gae"))
            return found
        if self.advantage == "gae":
            if self.critic is None:
                found.append(("algo.critic", "got null, expected a critic with algo.advantage gae; add `critic: {}`"))
            if self.loss == "gspo":
                why = "its one ratio per response would average the advantages of the tokens; use clipped_surrogate"
                found.append(("algo.loss", f"got gspo with algo.advantage gae: {why}"))
            return found
        for key, is_set in (("critic", self.critic is not None), ("gae", self.gae != GAE())):
            if is_set:
                found.append((f"algo.{key}", f"is for advantage gae, got {self.advantage}; remove it, or use algo.name ppo"))
        return found

    def _proximal_problems(self) -> Problems:
        """What would divide by π_b twice, and what needs a π_prox that is the learner's and stays fixed."""
        found: Problems = []
        if self.proximal == "behaviour" and self.correction.weight != "none":
            got = f"got {self.correction.weight} with algo.proximal: behaviour, expected none"
            twice = "the loss divides by π_b already, and would again; set it to none, or use proximal: recompute"
            found.append(("algo.correction.weight", f"{got}: {twice}"))
        rejects, stops = bool(self.correction.reject), self.max_inner_kl is not None and self.inner_steps > 1
        for key, is_set in (("correction.reject", rejects), ("max_inner_kl", stops)):
            if is_set and (why := _NEEDS_RECOMPUTE[key].get(self.proximal)):
                text = f"does not go with algo.proximal: {self.proximal}: {why}; use proximal: recompute"
                found.append((f"algo.{key}", text))
        return found


def contradictions(name: str, before: str, written: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Keys of ``written`` (an ``algo`` section made for the name ``before``) that keep ``name`` from being more than a label:
    each that either of the two presets and that says otherwise, with the value that ``name`` stands for."""
    stands_for = Algo.model_validate({"name": name}).model_dump()
    found = {}
    for path in {*_leaves(PRESETS[before]), *_leaves(PRESETS[name])}:
        said, meant = written, stands_for
        for key in path:
            said = said.get(key, {}) if isinstance(said, Mapping) else {}
            meant = meant[key]
        if said != {} and said != meant:
            found[path] = meant
    return found


def _leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in tree.items():
        found += _leaves(value, (*above, key)) if isinstance(value, Mapping) else [(*above, key)]
    return found


def _over(preset: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """``written`` merged over ``preset``, section by section."""
    merged = {**preset, **written}
    for key, value in preset.items():
        if isinstance(value, Mapping) and isinstance(written.get(key), Mapping):
            merged[key] = _over(value, written[key])
    return merged
