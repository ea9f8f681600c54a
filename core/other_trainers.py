"""What keys of TRL and verl are called here, for those who bring a configuration along: hints of the unknown-key error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TRL = {
    "adam_beta1": "trainer.optimizer.betas",
    "adam_beta2": "trainer.optimizer.betas",
    "adam_epsilon": "trainer.optimizer.eps",
    "beta": "algo.kl.coefficient",
    "bf16": "model.dtype",
    "dataset_name": "data.source",
    "delta": "algo.dual_clip",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "eval_steps": "monitor.eval.every",
    "gradient_accumulation_steps": "trainer.max_tokens_per_microbatch",
    "importance_sampling_level": "algo.loss",
    "learning_rate": "trainer.optimizer.lr",
    "loss_type": "algo.reduction",
    "lr_scheduler_type": "trainer.optimizer.schedule",
    "mask_truncated_completions": "algo.overlong.filter",
    "max_completion_length": "rollout.sampling.max_tokens",
    "max_grad_norm": "trainer.optimizer.max_grad_norm",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "schedule.steps",
    "model_name_or_path": "model.path",
    "num_generations": "schedule.group_size",
    "num_iterations": "algo.epochs",
    "num_train_epochs": "data.epochs",
    "output_dir": "name",
    "per_device_train_batch_size": "schedule.groups_per_step",
    "ref_model_sync_steps": "algo.kl.refresh_every",
    "report_to": "monitor.sinks",
    "reward_funcs": "reward.parts",
    "reward_weights": "reward.parts.weight",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algo.advantage",
    "steps_per_generation": "algo.minibatches",
    "teacher_model": "distill.teacher",
    "temperature": "rollout.sampling.temperature",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel",
    "warmup_steps": "trainer.optimizer.warmup_steps",
    "weight_decay": "trainer.optimizer.weight_decay",
}
VERL = {
    "actor_rollout_ref.actor.clip_ratio": "algo.clip_low",
    "actor_rollout_ref.actor.clip_ratio_c": "algo.dual_clip",
    "actor_rollout_ref.actor.clip_ratio_high": "algo.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "algo.clip_low",
    "actor_rollout_ref.actor.grad_clip": "trainer.optimizer.max_grad_norm",
    "actor_rollout_ref.actor.kl_loss_coef": "algo.kl.coefficient",
    "actor_rollout_ref.actor.kl_loss_type": "algo.kl.estimator",
    "actor_rollout_ref.actor.loss_agg_mode": "algo.reduction",
    "actor_rollout_ref.actor.optim.lr": "trainer.optimizer.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "trainer.optimizer.warmup_steps",
    "actor_rollout_ref.actor.ppo_epochs": "algo.epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "trainer.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algo.minibatches",
    "actor_rollout_ref.actor.use_kl_loss": "algo.kl.placement",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_num_seqs",
    "actor_rollout_ref.rollout.n": "schedule.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.sampling.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_parallel",
    "algorithm.adv_estimator": "algo.name",
    "algorithm.gamma": "algo.gae.gamma",
    "algorithm.kl_ctrl.kl_coef": "algo.kl.coefficient",
    "algorithm.lam": "algo.gae.lam",
    "algorithm.use_kl_in_reward": "algo.kl.placement",
    "critic.model.path": "algo.critic.path",
    "critic.optim.lr": "algo.critic.optimizer.lr",
    "custom_reward_function.path": "reward.parts",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.sampling.max_tokens",
    "data.train_batch_size": "schedule.groups_per_step",
    "data.train_files": "data.source",
    "data.val_files": "monitor.eval.source",
    "trainer.experiment_name": "name",
    "trainer.logger": "monitor.sinks",
    "trainer.n_gpus_per_node": "trainer.ranks",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "monitor.eval.every",
    "trainer.total_epochs": "data.epochs",
    "trainer.total_training_steps": "schedule.steps",
}
_MOST = 6


def called_here(key: str, value: Any) -> str:
    """What an unknown ``key`` (``a.b.c``), and the keys of a mapping ``value`` below it, are called here; nothing if unknown.

    >>> called_here("num_generations", 8)
    "TRL's num_generations is `schedule.group_size` here"
    """
    known = [f"verl's {leaf} is `{VERL[leaf]}`" for leaf in _leaves(key, value) if leaf in VERL]
    if not known and (name := key.rpartition(".")[2]) in TRL:
        known = [f"TRL's {name} is `{TRL[name]}`"]
    return f"{', '.join(known[:_MOST])} here" if known else ""


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key
