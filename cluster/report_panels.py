"""Which metrics the report shows together, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Panel:
    """A small line chart.  ``series`` are (metric, label); those that were never logged are left out."""

    title: str
    caption: str
    series: tuple[tuple[str, str], ...]
    unit: str = ""
    share: bool = False  # the axis is 0 to 1
    limit: float | None = None
    from_zero: bool = True


def panels(bound: int | None) -> list[Panel]:
    """The small charts, in the order of the page."""
    return [
        Panel(
            "How old the data is",
            "In committed batches: mean over tokens, oldest token of a sample, and the oldest KV entry a token attended to.",
            (
                ("staleness/token_mean", "token, mean"),
                ("staleness/sample_oldest_max", "oldest in a sample, max"),
                ("staleness/kv_mean", "KV cache, mean"),
            ),
            unit="batches",
            limit=bound,
        ),
        Panel(
            "Where the age comes from",
            "While the response was written, and while it waited for its batch.",
            (("staleness/in_flight_mean", "in flight"), ("staleness/queued_mean", "queued")),
            unit="batches",
        ),
        Panel(
            "Tokens held out as too old",
            "Share of the batch's tokens whose lag, or that of their KV entries, exceeds its bound: they get no loss weight.",
            (("staleness/masked_frac", "masked"), ("staleness/kv_masked_frac", "for their KV entries alone")),
            unit="share of tokens",
        ),
        Panel(
            "Versions in one response",
            "Above 1, weights changed while responses were being written.",
            (("staleness/versions_per_sample", "mean"), ("staleness/versions_per_sample_max", "max")),
            unit="versions",
        ),
        Panel(
            "Who waits",
            "Share of the time that the learner waits for data, and that the engines hold no request.",
            (("idle/learner", "learner"), ("idle/rollout", "rollout")),
            unit="idle share",
            share=True,
        ),
        Panel(
            "Throughput",
            "Tokens sampled, and tokens that the learner went through: prompts, and every epoch, count.",
            (("throughput/rollout_tokens_per_s", "rollout"), ("throughput/trained_tokens_per_s", "trained")),
            unit="tokens per second",
        ),
        Panel(
            "Importance ratios",
            "Learner over sampler, per token, at the start of the batch; truncated is what weighs the loss.",
            (
                ("offpolicy/ratio_mean", "mean"),
                ("offpolicy/ratio_max", "max"),
                ("offpolicy/ratio_truncated_mean", "truncated, mean"),
            ),
            unit="ratio",
        ),
        Panel(
            "What off-policy data costs",
            "Effective sample size as a share of the tokens, and the share whose gradient the clip removes.",
            (
                ("offpolicy/ess", "effective sample size"),
                ("offpolicy/clip_frac", "clipped"),
                ("offpolicy/masked_frac", "masked"),
            ),
            unit="share",
            share=True,
        ),
        Panel("Entropy", "Of the policy, per token.", (("loss/entropy", "entropy"),), unit="nats"),
        Panel("Gradient norm", "Before clipping.", (("loss/grad_norm", "policy"), ("critic/grad_norm", "critic"))),
        Panel(
            "Divergence",
            "Of the policy from its reference and its teacher, and of the learner from the sampler.",
            (("kl/ref", "to the reference"), ("distill/kl", "to the teacher"), ("offpolicy/sampler_kl", "learner to sampler")),
            unit="nats per token",
        ),
        Panel(
            "Loss",
            "By stream.",
            (("loss/policy", "policy"), ("loss/ce", "cross-entropy"), ("loss/kl", "KL"), ("loss/distill", "distillation")),
            from_zero=False,
        ),
        Panel(
            "Critic",
            "Share of the variance of the returns that its values explain before the batch, and of tokens that the clip holds.",
            (("critic/explained_variance", "explained variance"), ("critic/clip_frac", "clipped")),
            from_zero=False,
        ),
        Panel(
            "Critic's loss",
            "And the mean of its values.",
            (("critic/loss", "loss"), ("critic/value_mean", "value, mean")),
            from_zero=False,
        ),
        Panel("KL coefficient", "Of the penalty in the reward.", (("kl/coefficient", "coefficient"),)),
        Panel(
            "Response length",
            "In tokens.",
            (("response/length_mean", "mean"), ("response/length_max", "longest")),
            unit="tokens",
        ),
        Panel(
            "How responses end",
            "By themselves, or cut off at the limit.",
            (("response/eos_frac", "end of sequence"), ("response/truncated_frac", "cut off")),
            unit="share",
            share=True,
        ),
        Panel(
            "New weights",
            "From the commit to the last engine's confirmation, and how long an engine stood still for it.",
            (("weights/publish_s", "publication"), ("weights/pause_s", "pause")),
            unit="seconds",
        ),
        Panel(
            "Speculation",
            "Tokens per verified draft: the accepted ones, and the target's own.",
            (("draft/acceptance_length", "acceptance length"), ("draft/baseline", "draft at rest")),
            unit="tokens",
        ),
        Panel(
            "Acceptance by draft position",
            "Share of the drafts whose first k tokens were accepted.",
            tuple((f"draft/acceptance_pos_{k}", f"first {k}" if k > 1 else "first") for k in (1, 2, 3, 4, 6, 8)),
            unit="share",
            share=True,
        ),
        Panel(
            "Acceptance along the response",
            "Tokens per verified draft, by the quarter of sampling.max_tokens in which it began.",
            tuple((f"draft/acceptance_length_q{q}", f"quarter {q}") for q in (1, 2, 3, 4)),
            unit="tokens",
        ),
        Panel("Draft age", "Batches since the draft last learned.", (("draft/lag", "lag"),), unit="batches"),
        Panel(
            "What the draft's learning costs",
            "Share of the engines' working time that updates of the draft took.",
            (("draft/cost_share", "share"),),
            unit="share of time",
        ),
    ]
