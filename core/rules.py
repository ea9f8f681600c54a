"""The rules between a recipe's sections, as (key, problem): all of them, so that one run of `validate` shows everything."""

from __future__ import annotations

from slipstream.core.algorithms import OF_GROUPS
from slipstream.core.built_in import WITHOUT_CLOCK, WITHOUT_SCORE
from slipstream.core.schema import Recipe
from slipstream.core.section import Problems


def problems(recipe: Recipe) -> Problems:
    """Every rule that the recipe breaks."""
    found = recipe.algo.problems() + recipe.distill.problems() + recipe.schedule.problems()
    for rules in (_of_batches, _of_weights, _of_lengths, _of_rewards, _of_waits, _of_critic, _of_speculation, _of_distillation):
        found += rules(recipe)
    return found


def _of_batches(recipe: Recipe) -> Problems:
    """Groups, siblings and mini-batches."""
    schedule, rollout, algo = recipe.schedule, recipe.rollout, recipe.algo
    found: Problems = []
    if schedule.group_size > rollout.max_num_seqs:
        most = f"expected at most rollout.max_num_seqs = {rollout.max_num_seqs}"
        why = "a group must fit into one engine: raise max_num_seqs or lower group_size"
        found.append(("schedule.group_size", f"got {schedule.group_size}, {most}; {why}"))
    if algo.name == "sft":
        return found
    if algo.advantage in OF_GROUPS and schedule.group_size < 2:
        compares = f"algo.advantage {algo.advantage} compares siblings"
        found.append(("schedule.group_size", f"got 1, expected at least 2: {compares}"))
    elif algo.advantage not in ("none", "gae") and schedule.group_size * schedule.groups_per_step < 2:
        compares = f"algo.advantage {algo.advantage} compares samples"
        found.append(("schedule.groups_per_step", f"got 1 group of 1, but {compares}"))
    if algo.minibatches > schedule.groups_per_step:
        most = f"expected at most schedule.groups_per_step = {schedule.groups_per_step}"
        found.append(("algo.minibatches", f"got {algo.minibatches}, {most}; a mini-batch holds whole groups"))
    return found


def _of_weights(recipe: Recipe) -> Problems:
    """How weights are trained and kept."""
    found: Problems = []
    if recipe.algo.name == "sft" and recipe.warm_start is not None:
        found.append(("warm_start", "algo.name sft trains on demonstrations throughout; remove warm_start"))
    if recipe.model.dtype == "bfloat16" and recipe.trainer.zero_stage == 0:
        why = "only they keep float32 weights and accumulate in float32 (1 costs nothing, also on one rank)"
        found.append(("trainer.zero_stage", f"got 0 with model.dtype bfloat16, expected 1, 2 or 3: {why}"))
    return found


def _of_lengths(recipe: Recipe) -> Problems:
    got, limit = recipe.rollout.sampling.max_tokens, recipe.model.max_length
    if limit is None or got < limit or recipe.algo.name == "sft":
        return []
    expected = f"expected less than model.max_length = {limit}: prompts need room too"
    return [("rollout.sampling.max_tokens", f"got {got}, {expected}")]


def _of_rewards(recipe: Recipe) -> Problems:
    """Rewards that teach nothing."""
    parts, algo, found = recipe.reward.parts, recipe.algo, Problems()
    environment = recipe.rollout.environment.name
    if environment in WITHOUT_SCORE and any(part.function == "environment" for part in parts):
        found.append(("reward.parts", f"environment: {environment} has no score; use another reward function"))
    learns = algo.name != "sft" and algo.advantage != "none" and not recipe.teaches
    if learns and not any(part.weight for part in parts):
        why = f"algo.advantage {algo.advantage} learns from their sum; give one of them a weight"
        found.append(("reward.parts", f"got weight 0 for each, expected another for one: {why}"))
    return found


def _of_waits(recipe: Recipe) -> Problems:
    """What may take longer than the time after which a run counts as stalled."""
    environment, reward, limit_s = recipe.rollout.environment, recipe.reward, recipe.cluster.stall_timeout_s
    episode_s = environment.max_turns * environment.timeout_s
    found: Problems = []
    if environment.name != "single_turn" and episode_s >= limit_s:
        of = f"more than rollout.environment.max_turns · timeout_s = {episode_s:g} s: an episode may take so long"
        found.append(("cluster.stall_timeout_s", f"got {limit_s:g} s, expected {of}"))
    if any(part.function not in WITHOUT_CLOCK for part in reward.parts) and reward.timeout_s >= limit_s:
        of = f"more than reward.timeout_s = {reward.timeout_s:g} s: a group may be graded for so long"
        found.append(("cluster.stall_timeout_s", f"got {limit_s:g} s, expected {of}"))
    return found


def _of_critic(recipe: Recipe) -> Problems:
    """A critic, or an adaptive KL, and the schedule."""
    algo, schedule, found = recipe.algo, recipe.schedule, Problems()
    if algo.critic is not None and algo.critic.warmup_batches >= schedule.steps:
        limit = f"less than schedule.steps = {schedule.steps}: the policy would never be trained"
        found.append(("algo.critic.warmup_batches", f"got {algo.critic.warmup_batches}, expected {limit}"))
    samples = schedule.group_size * schedule.groups_per_step
    if algo.kl.target is not None and algo.kl.horizon < samples:
        limit = f"at least the {samples} responses of a batch: it would change the coefficient by more than a fifth"
        found.append(("algo.kl.horizon", f"got {algo.kl.horizon}, expected {limit}"))
    return found


def _of_speculation(recipe: Recipe) -> Problems:
    rollout = recipe.rollout
    found = rollout.speculation.problems(
        seeded=rollout.sampling.seeded, tensor_parallel=rollout.tensor_parallel, engines=rollout.engines
    )
    return [(f"rollout.speculation.{key}", problem) for key, problem in found]


def _of_distillation(recipe: Recipe) -> Problems:
    """A teacher for those who need one, and nothing set for a stream that is not there."""
    algo, teaches = recipe.algo, recipe.teaches
    if algo.name == "sft":
        no_rollouts = "sft has no rollouts for a teacher to judge; remove it, or use algo.name opd"
        return [("distill.teacher", no_rollouts)] if teaches else []
    found: Problems = []
    if not teaches and (algo.name == "opd" or algo.advantage == "none"):
        setting = "algo.name opd" if algo.name == "opd" else "algo.advantage none"
        found.append(("distill.teacher", f"got null, expected a model to learn from: {setting} trains on nothing else"))
    if algo.advantage == "gae" and teaches == "policy_gradient":
        why = "the learner makes its advantages, and would whiten the teacher's part with them; use form: full"
        found.append(("distill.form", f"got policy_gradient with algo.advantage gae: {why}"))
    elif algo.loss == "gspo" and teaches == "policy_gradient":
        why = "its one ratio per response would average the teacher's verdicts on tokens; use form: full, or another loss"
        found.append(("distill.form", f"got policy_gradient with algo.loss gspo: {why}"))
    if algo.advantage == "none" and algo.kl_in_reward:
        found.append(("algo.kl.placement", "got reward with algo.advantage none: rewards train nothing; use loss"))
    if not recipe.trains_rl:
        why = "acts on the RL stream, and with algo.advantage none there is none; remove it"
        settings = {"algo.kl.coefficient": algo.kl.coefficient, "algo.correction.reject": algo.correction.reject}
        found += [(key, why) for key, is_set in settings.items() if is_set]
    return found
