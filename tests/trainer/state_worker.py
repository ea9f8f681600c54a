"""One rank of the resume test.

    python state_worker.py RANK WORLD_SIZE PORT MODEL FOLDER MODES CASES_JSON

Modes (one, or two with a comma): ``save``, four batches straight, and in a new learner two batches and ``save``;
``resume``, ``load`` and the other two batches.
A case is [name, ZeRO stage, dtype], with a critic where the name begins with "ppo"; FOLDER/<name>/ gets
``straight.safetensors``, ``saved/`` and ``resumed.safetensors``.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import deepspeed
import torch
from safetensors.torch import save_file

from slipstream.core import schema
from slipstream.core.records import Steps, TrainBatch, TrainSample, WeightVersion
from slipstream.trainer import distributed
from slipstream.trainer.learner import Learner

OPTIMIZER = schema.Optimizer(lr=1e-3, schedule="cosine", warmup_steps=1, weight_decay=0.1)


def batch(number: int) -> TrainBatch:
    rng = random.Random(number)
    samples = []
    for i in range(8):
        prompt, length = rng.randint(1, 6), rng.randint(2, 9)
        samples.append(
            TrainSample(
                sample_id=str(i),
                input_ids=tuple(rng.randrange(64) for _ in range(prompt + length)),
                prompt_length=prompt,
                rl=(1.0,) * length,
                ce=(0.0,) * length,
                distill=(0.0,) * length,
                advantages=(rng.gauss(0, 1),) * length,
                behaviour_logprobs=tuple(rng.gauss(-5, 1) for _ in range(length)),
                lag=(0,) * length,
                steps=Steps(rewards=(*[0.0] * (length - 1), rng.gauss(0, 1)), actions=(True,) * length),
            )
        )
    tokens = float(sum(len(s.rl) for s in samples))
    return TrainBatch(
        version=WeightVersion(0, number),
        minibatches=(tuple(samples),),
        rl_denominators=(tokens,),
        ce_denominators=(0.0,),
        distill_denominators=(0.0,),
    )


def learner_of(model: str, name: str, stage: int, dtype: str, rank: int, world_size: int) -> Learner:
    kl = {"coefficient": 0.1, "placement": "loss", "estimator": "k3"}
    critic = {"optimizer": {"lr": 3e-3, "schedule": "linear", "weight_decay": 0.1}, "warmup_batches": 1}
    ppo = {"name": "ppo", "critic": critic} if name.startswith("ppo") else {}
    recipe = schema.Recipe.model_validate(
        {
            "name": "resume",
            "model": {"path": model, "dtype": dtype},
            "data": {"source": "builtin:number_sorting"},
            "algo": {"epochs": 2, "kl": kl, **ppo},
            "schedule": {"steps": 4},
            "trainer": {"ranks": world_size, "zero_stage": stage, "max_tokens_per_microbatch": 32},
        }
    )
    return Learner(recipe, Path(model), rank, world_size)


def fresh(learner: Learner) -> Learner:
    learner.begin_phase(OPTIMIZER, 8)
    learner.set_reference()
    if learner.recipe.algo.critic is not None:
        learner.set_critic()
    return learner


def dump(learner: Learner, file: Path) -> None:
    """Weights, float32 weights and moments, gathered."""
    found = {}
    trained = [("", learner.policy, learner.adamw)]
    if learner.critic is not None:
        trained.append(("critic.", learner.critic.module, learner.critic.adamw))
    for prefix, module, adamw in trained:
        for name, parameter in module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                found[f"weight/{prefix}{name}"] = parameter.detach().clone()
            for key in ("master", "exp_avg", "exp_avg_sq"):
                found[f"{key}/{prefix}{name}"] = adamw.gather(parameter, key)  # type: ignore[arg-type]
    if learner.rank == 0:
        save_file(found, file)


def draws() -> list[float]:
    return [random.random(), float(torch.rand(()))]


def straight_and_saved(place: Path, learner: Callable[[], Learner]) -> None:
    straight = fresh(learner())
    for number in range(4):
        straight.train(batch(number))
    dump(straight, place / "straight.safetensors")
    half = fresh(learner())
    for number in range(2):
        half.train(batch(number))
    half.save(place / "saved")
    (place / f"draws-{half.rank}.json").write_text(json.dumps(draws()))


def resumed(place: Path, learner: Callable[[], Learner]) -> None:
    second = learner()
    second.load(place / "saved")
    (place / f"draws-resumed-{second.rank}.json").write_text(json.dumps(draws()))
    for number in range(2, 4):
        second.train(batch(number))
    dump(second, place / "resumed.safetensors")


def main() -> None:
    rank, world_size, port = (int(a) for a in sys.argv[1:4])
    model, folder, modes = sys.argv[4], Path(sys.argv[5]), sys.argv[6].split(",")
    torch.set_num_threads(1)
    distributed.join(rank, world_size, "127.0.0.1", port, timeout_s=120)
    for mode in modes:
        for name, stage, dtype in json.loads(sys.argv[7]):
            place = folder / name
            place.mkdir(exist_ok=True)
            run = straight_and_saved if mode == "save" else resumed
            run(place, partial(learner_of, model, name, stage, dtype, rank, world_size))
    distributed.leave()


if __name__ == "__main__":
    main()
