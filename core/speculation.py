"""The section ``rollout.speculation`` of a recipe: who drafts, how drafts are judged, whether the draft keeps learning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from slipstream.core.section import Fraction, NonNegative, Positive, Problems, Rate, Section

Method = Literal["none", "ngram", "suffix", "draft_model", "eagle3", "dflash", "medusa", "mtp"]
WITH_DRAFT = ("draft_model", "eagle3", "dflash", "medusa")
"""Methods whose draft is a folder of weights; ``mtp`` may take one, or use the target's own layers."""
DRAFT_CAN_BE_MADE = ("draft_model", "eagle3")
"""Methods whose draft ``slipstream draft train`` can make."""
STEPWISE = ("draft_model", "eagle3", "mtp")
"""Methods that draft one token after the other, so that fewer tokens take less time."""
DRAWING = ("draft_model", "eagle3", "dflash", "mtp")
"""Methods whose drafts can be drawn at temperature > 0; others propose one certain token, which is exact too."""
LEARNING = ("draft_model", "eagle3", "dflash")
"""Methods whose draft Test-Time Speculation can train."""
MOST_TOKENS = 128
"""vLLM's own limit of draft tokens per round."""


_NEW_MODEL = ("hidden_size", "layers", "heads")


class TestTimeSpeculation(Section):
    """The draft learns from every verdict of the target while it serves (Kumar, Sanghavi, Das 2026, arXiv 2605.09329).

    Loss of one update, over the draft positions k whose prefix was accepted: Σ w_k (KL(p ‖ q′) + proximal · KL(q ‖ q′)),
    over Σ w_k, with w_k = exp(−(k − 1) / decay), p of the target, q of the draft when it proposed, q′ of the draft now.
    """

    __test__ = False  # not a test, whatever pytest makes of the name

    enabled: bool = Field(False, description="let the draft learn while it serves")
    every: Positive = Field(5, description="rounds between two updates of the draft")
    lr: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1e-4, description="of Adam; halved whenever the kill switch restores the draft"
    )
    train: Literal["all", "body"] = Field("all", description="body: all but the draft's embeddings and output head")
    proximal: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="pull to the draft that proposed; no gradient at the weights that proposed, so it acts on late updates"
    )
    decay: Rate | None = Field(None, description="in draft positions; default: rollout.speculation.tokens")
    rounds: Literal["all", "latest"] = Field("all", description="which of the rounds since the last update are learnt from")
    max_grad_norm: Rate = Field(1.0, description="norm to which larger gradients of the draft are scaled down")
    max_requests: Positive = Field(8, description="requests that are followed at a time; the others only use the draft")
    max_memory_mib: Rate = Field(256.0, description="of recorded distributions and the followed requests' draft caches")
    max_cost_share: Fraction = Field(0.15, description="share of the engine's time that updates may take; they wait beyond it")
    max_replica_kl: Rate = Field(1e-3, description="nats between the draft in the engine and its trainable copy, at the start")
    baseline_rounds: Positive = Field(
        20,
        description="rounds that measure the baseline: at rest first and after a restore, learning on after new weights",
    )
    share_every_s: Rate | None = Field(
        None, description="seconds between two averagings of the engines' drafts, by accepted tokens; default: never"
    )
    kill_below: Fraction = Field(
        0.95, description="share of the baseline's acceptance length; below it the last good draft is restored"
    )


class DraftTraining(Section):
    """How ``slipstream draft train`` makes the draft: forward-KL distillation on the policy's own responses.

    draft_model: a new model of ``hidden_size``, ``layers`` and ``heads`` in the policy's architecture, or its ``first_layers``.
    eagle3: a head that reads the inputs of the policy's layers ``features``, over its most frequent ``vocabulary`` tokens.
    """

    samples: Annotated[int, Field(ge=2)] = Field(128, description="responses, one each to the first prompts of the data")
    max_tokens: Positive = Field(256, description="tokens of a response at most")
    steps: Positive = Field(200, description="optimizer steps")
    batch_size: Positive = Field(4, description="responses per step")
    lr: Rate = Field(1e-3, description="of AdamW, with a short warm-up and a cosine down to 5 %")
    first_layers: Positive | None = Field(
        None, description="draft_model: the policy's first so many layers are the draft; default: a new model"
    )
    hidden_size: Positive = Field(64, description="draft_model: width of the new model")
    layers: Positive = Field(1, description="draft_model: layers of the new model")
    heads: Positive = Field(2, description="draft_model: attention heads of the new model")
    features: tuple[NonNegative, NonNegative, NonNegative] | None = Field(
        None, description="default: 2, half of the layers, all but 3; a policy of fewer than 7 needs them given"
    )
    vocabulary: Positive | None = Field(None, description="default: all tokens")

    @model_validator(mode="after")
    def _rules(self) -> DraftTraining:
        if self.hidden_size % (2 * self.heads):
            got = f"got {self.hidden_size} with {self.heads} heads"
            raise ValueError(f"hidden_size: {got}, expected a multiple of twice the heads (rotary embedding)")
        if self.features is not None and list(self.features) != sorted(set(self.features)):
            raise ValueError(
                f"features: got {list(self.features)}, expected three different layers, ascending, as vLLM reads them"
            )
        return self


class Speculation(Section):
    """Speculative decoding by vLLM's own implementations: exact, so only speed depends on it (docs/speculation.md)."""

    method: Method = Field("none", description="who drafts; ngram and suffix need no draft model")
    tokens: Annotated[int, Field(gt=0, le=MOST_TOKENS)] = Field(4, description="draft tokens per round")
    lookahead: Literal["fixed", "dynamic"] = Field(
        "fixed", description="dynamic: 0 to `tokens`, whatever writes most per second by acceptance and time so far (CPU only)"
    )
    tokens_by_batch: list[tuple[Positive, Positive, Annotated[int, Field(ge=0, le=MOST_TOKENS)]]] = Field(
        default_factory=list, description="[fewest requests, most, draft tokens], vLLM's table; default: always `tokens`"
    )
    draft: str | None = Field(
        None, description="folder of the draft (draft_model: as model.path); mtp without one uses the target's layers"
    )
    universal: bool = Field(False, description="draft_model with another tokenizer: it drafts the tokens that both have")
    sample: Literal["probabilistic", "greedy"] | None = Field(
        None, description="how drafts are drawn at temperature > 0; default: probabilistic, greedy with `universal`"
    )
    rejection: Literal["standard", "block", "synthetic"] = Field(
        "standard", description="block: drafts judged together (GPU); synthetic: accepted by lot, for benchmarks, lossy"
    )
    synthetic_length: Rate | None = Field(None, description="acceptance length that synthetic rejection pretends")
    allow_lossy: bool = Field(False, description="permit settings that change what the policy writes; the summary says so")
    lookup_min: Positive = Field(2, description="ngram: fewest tokens of the response's end to find again")
    lookup_max: Positive = Field(5, description="ngram: most of them")
    tts: TestTimeSpeculation = Field(default_factory=TestTimeSpeculation)
    training: DraftTraining = Field(default_factory=DraftTraining)

    @property
    def on(self) -> bool:
        return self.method != "none"

    @property
    def learns(self) -> bool:
        return self.on and self.tts.enabled

    @property
    def tapped(self) -> bool:
        """Whether something of ours acts in vLLM's worker, beyond counting: it stands on model runner V1."""
        return self.learns or (self.on and self.lookahead == "dynamic")

    @property
    def steady(self) -> bool:
        """Whether every round drafts as many tokens."""
        return self.lookahead == "fixed" and not self.tokens_by_batch

    @property
    def lossy(self) -> bool:
        """Whether responses may differ in law from the policy's own."""
        return self.on and self.rejection == "synthetic"

    @property
    def draws(self) -> Literal["probabilistic", "greedy"]:
        """How drafts are drawn, with the default filled in."""
        return self.sample or ("greedy" if self.universal else "probabilistic")

    def problems(self, *, seeded: bool, tensor_parallel: int, engines: int) -> Problems:
        """Broken rules that need neither files nor a device, as (key within this section, problem)."""
        if not self.on:
            given = [] if "method" in self.model_fields_set else sorted(self.model_fields_set)
            return [(key, "acts only with a rollout.speculation.method; set one, or remove it") for key in given]
        return [*self._draft_problems(), *self._judging_problems(seeded), *self._learning_problems(tensor_parallel, engines)]

    def _draft_problems(self) -> Problems:
        found: Problems = []
        if self.method in WITH_DRAFT and self.draft is None:
            found.append(("draft", f"got null, expected the folder of the draft: method {self.method} needs one"))
        if self.method in ("ngram", "suffix") and self.draft is not None:
            found.append(("draft", f"got {self.draft!r}, but method {self.method} drafts from the text so far; remove it"))
        if self.universal and self.method != "draft_model":
            found.append(("universal", f"got true with method {self.method}, expected draft_model: only it maps tokens"))
        if self.method != "ngram":
            for key in self.changed("lookup_min", "lookup_max"):
                found.append((key, f"got {getattr(self, key)} with method {self.method}: it acts only with ngram; remove it"))
        elif self.lookup_min > self.lookup_max:
            found.append(("lookup_min", f"got {self.lookup_min}, expected at most lookup_max = {self.lookup_max}"))
        if self.lookahead == "dynamic" and self.method not in STEPWISE:
            found.append(("lookahead", f"got dynamic with method {self.method}, expected {' or '.join(STEPWISE)}"))
        if self.lookahead == "dynamic" and self.tokens_by_batch:
            found.append(("lookahead", "got dynamic with tokens_by_batch: each says how many tokens to draft; remove one"))
        return [*found, *self._table_problems(), *self._training_problems()]

    def _table_problems(self) -> Problems:
        found: Problems = []
        for first, last, tokens in self.tokens_by_batch:
            if first > last or tokens > self.tokens:
                found.append(
                    (
                        "tokens_by_batch",
                        f"got {[first, last, tokens]}, expected [fewest, most, draft tokens] with fewest ≤ most and at most "
                        f"tokens = {self.tokens}",
                    )
                )
        starts = [first for first, _, _ in self.tokens_by_batch]
        ends = [last for _, last, _ in self.tokens_by_batch]
        if not found and starts and (starts[0] != 1 or any(end >= start for end, start in zip(ends, starts[1:], strict=False))):
            got = [[first, last] for first, last, _ in self.tokens_by_batch]
            found.append(
                ("tokens_by_batch", f"got requests {got}, expected ranges that begin with 1, ascend, and do not overlap")
            )
        return found

    def _training_problems(self) -> Problems:
        """Keys of the training of another draft than the method's."""
        others = {"draft_model": ("features", "vocabulary"), "eagle3": ("first_layers", *_NEW_MODEL)}
        found = [
            (f"training.{key}", f"got a value with method {self.method}, whose draft has none; remove it")
            for key in self.training.changed(*others.get(self.method, ()))
        ]
        if self.method == "draft_model" and self.training.first_layers is not None:
            for key in self.training.changed(*_NEW_MODEL):
                found.append(
                    (f"training.{key}", "describes a new model, and training.first_layers takes the policy's; remove one")
                )
        return found

    def _judging_problems(self, seeded: bool) -> Problems:
        found: Problems = []
        if self.lossy and not self.allow_lossy:
            found.append(
                (
                    "rejection",
                    f"got {self.rejection}, which accepts drafts that the policy would not write; use standard, or say "
                    "allow_lossy: true",
                )
            )
        if self.lossy != (self.synthetic_length is not None):
            found.append(("synthetic_length", "goes with rejection: synthetic, and only with it"))
        elif self.synthetic_length is not None and not 1 <= self.synthetic_length <= self.tokens + 1:
            found.append(("synthetic_length", f"got {self.synthetic_length:g}, expected 1 to tokens + 1 = {self.tokens + 1}"))
        if self.sample is not None and self.method not in DRAWING:
            text = f"got {self.sample} with method {self.method}, whose drafts are certain, not drawn; remove it"
            found.append(("sample", text))
        if self.universal and self.sample == "probabilistic":
            found.append(("sample", "got probabilistic with universal, expected greedy: vLLM maps greedy drafts only"))
        if seeded and self.method != "ngram":
            found.append(
                (
                    "method",
                    f"got {self.method} with rollout.sampling.seeded, expected none or ngram: other drafts depend on the "
                    "requests beside them, so a seed does not fix the response",
                )
            )
        return found

    def _learning_problems(self, tensor_parallel: int, engines: int) -> Problems:
        if not self.tts.enabled:
            shared = self.tts.share_every_s is not None
            return [("tts.share_every_s", "acts only with tts.enabled; remove it, or enable tts")] if shared else []
        found: Problems = []
        if self.tts.share_every_s is not None and engines == 1:
            found.append(("tts.share_every_s", "acts between engines, and rollout.engines is 1; remove it, or raise engines"))
        if self.method not in LEARNING:
            found.append(("tts.enabled", f"got true with method {self.method}, expected {' or '.join(LEARNING)}"))
        if self.draws != "probabilistic":
            found.append(("tts.enabled", "got true with greedy drafts, expected sample: probabilistic (and no universal)"))
        if self.rejection != "standard":
            found.append(("tts.enabled", f"got true with rejection {self.rejection}, expected standard"))
        if self.method == "dflash" and self.tokens_by_batch:
            why = "a head that drafts all its tokens at once drafts others when they are fewer, and its copy does not"
            found.append(("tokens_by_batch", f"does not go with tts.enabled and method dflash: {why}; remove one"))
        if tensor_parallel > 1:
            found.append(
                ("tts.enabled", f"got true with rollout.tensor_parallel = {tensor_parallel}, expected 1: not built yet")
            )
        return found
