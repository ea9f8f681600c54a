"""Test-Time Speculation on SmolLM2-135M: a frozen EAGLE-3 head against one that learns while it serves, on the same responses.

Replay: the policy's responses are recorded once, with the hidden states; every arm then replays them.  A token x of the
policy's was accepted from a draft q with probability min(1, q(x) / p(x)) (speculative sampling is exact), so a replay gives
the acceptance that the arm would have had, with the same random numbers for all arms.  The head is made by `slipstream draft
train` on other, short responses.  EOS is not sampled, so that responses are long.

acceptance_<arm>_<from>        expected tokens per round, in bins of 250 tokens of the response
acceptance_gain_long           tts − frozen beyond 500 tokens, per prompt
acceptance_gain_early          the same within the first 400 tokens
acceptance_gain_novel          the same over rounds none of whose drafted tokens ends 5 that stood in the response before
acceptance_gain_novel_start    the same over rounds whose first drafted token does not
acceptance_gain_after_drift    tts − frozen on responses of a policy that was fine-tuned on Python source, with the same head
<gain>_model                   each of these with a small model as draft, the policy's first layers
<gain>_mean, _standard_error   of each of these gains, over prompts
drift_nats                     log-probability per token that the fine-tuning gave those responses
repeated_share                 the other rounds
update_s_<arm>                 seconds of one update of the head, and of the drafts before it (one thread)

Live: two prompts, one request at a time, in the engine; responses go on past EOS.

tokens_ratio_<arm>_vs_none_<n>     tokens per second over those without speculation, at n tokens of the response
tokens_ratio_vs_frozen_<n>         of tts over the frozen head
live_acceptance_<arm>              tokens per round
update_cost_share                  of the engine's working time
tokens_ratio_<arm>_vs_none_batch4  four requests at a time, 250 tokens each
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import fmean, stdev
from typing import Any

import torch
from common import arguments, finish, prepare_environment, say
from torch import Tensor
from tts_live import live, live_batch
from tts_policy import PROMPTS, TEMPERATURE, TOKENS, fine_tuned, load_policy, made_head, made_model, record
from tts_replay import ARMS, Drafter, HeadDrafter, ModelDrafter, Round, look_at, replay, replay_ngram

BIN, SHORTER = 250, 600
NOVEL = {"novel": "repeated", "novel_start": "begins_repeated"}


def main() -> None:
    options = arguments(__doc__, extend)
    quick = options.quick
    prepare_environment()
    torch.set_num_threads(1)
    head_path, model_path = made_head(), made_model()
    policy, tokenizer = load_policy()
    figures: dict[str, list[float]] = defaultdict(list)
    made = {path.name: json.loads((path / "draft.json").read_text()) for path in (head_path, model_path)}
    figures["acceptance_on_short_responses"].append(made[head_path.name]["length_after"])
    figures["acceptance_on_short_responses_model"].append(made[model_path.name]["length_after"])
    if not options.replay:
        live(tokenizer, head_path, figures, (400,) if quick else (400, 1000), (3,) if quick else (2, 3))
        if not quick:
            live_batch(tokenizer, head_path, figures)
    prompts, length = ([0, 3], 600) if quick else ([*range(len(PROMPTS))], 1250)

    def new_head() -> Drafter:
        return HeadDrafter(head_path, policy.get_input_embeddings().weight)

    def new_model() -> Drafter:
        return ModelDrafter(model_path)

    def replayed(new: Callable[[], Drafter], arms: Iterable[str], suffix: str) -> None:
        for number, ids, prompt_length in record(policy, tokenizer, prompts, length, "own"):
            response = look_at(policy, new(), number, ids, prompt_length)
            rounds = {}
            for name in arms:
                if name != "tts_every_round" or number == 0:
                    rounds[name] = list(replay(new(), policy.vocab_size, response, ARMS[name], figures, f"{name}{suffix}"))
            rounds["ngram"] = list(replay_ngram(response))
            record_figures(figures, rounds, length, suffix)
            means = {name: round(sum(r.expected for r in of_arm) / len(of_arm), 3) for name, of_arm in rounds.items()}
            say(f"prompt {number}{suffix}: {means}")

    replayed(new_head, ARMS, "")
    replayed(new_model, ("frozen", "tts"), "_model")
    moved = fine_tuned(policy, tokenizer)
    after = prompts[: 1 if quick else 4]
    for number, ids, prompt_length in record(moved, tokenizer, after, SHORTER, "moved"):
        logp, logp_before = (look_at(model, new_head(), number, ids, prompt_length).logp_R for model in (moved, policy))
        figures["drift_nats"].append((logp - logp_before).mean().item())
        say(f"prompt {number}: moved by {figures['drift_nats'][-1]:.3f} nats per token")
        compare(moved, new_head, number, ids, prompt_length, figures, "_after_drift")
        compare(moved, new_model, number, ids, prompt_length, figures, "_model_after_drift")
    for gain in [name for name in figures if name.startswith("acceptance_gain")]:
        figures[f"{gain}_mean"].append(fmean(figures[gain]))
        if len(figures[gain]) > 1:
            figures[f"{gain}_standard_error"].append(stdev(figures[gain]) / len(figures[gain]) ** 0.5)
    setup = {"model": "SmolLM2-135M-Instruct", "drafts": made, "tokens": TOKENS, "temperature": TEMPERATURE, "length": length}
    finish("tts_replay" if options.replay else "tts", figures, quick, **setup)


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replay", action="store_true", help="nothing live")


def record_figures(figures: dict[str, list[float]], rounds: dict[str, list[Round]], length: int, suffix: str) -> None:
    def mean(arm: str, low: float = 0, high: float = float("inf"), without: str = "") -> float:
        chosen = [r.expected for r in rounds[arm] if low <= r.position < high and not (without and getattr(r, without))]
        return sum(chosen) / len(chosen) if chosen else float("nan")

    def gain(name: str, **keys: Any) -> None:
        figures[f"acceptance_gain_{name}{suffix}"].append(mean("tts", **keys) - mean("frozen", **keys))

    for arm in rounds:
        for low in range(0, length - BIN + 1, BIN):
            figures[f"acceptance_{arm}{suffix}_{low}"].append(mean(arm, low, low + BIN))
        figures[f"acceptance_{arm}{suffix}"].append(mean(arm))
        for name, without in NOVEL.items():
            figures[f"acceptance_{name}_{arm}{suffix}"].append(mean(arm, without=without))
    gain("long", low=500)
    gain("early", high=400)
    for name, without in NOVEL.items():
        gain(name, without=without)
    figures[f"repeated_share{suffix}"].append(sum(r.repeated for r in rounds["frozen"]) / len(rounds["frozen"]))


def compare(
    policy: Any,
    new: Callable[[], Drafter],
    number: int,
    ids: Tensor,
    prompt_length: int,
    figures: dict[str, list[float]],
    suffix: str,
) -> None:
    """The frozen draft against the one that learns on a response of ``policy``, in bins of 200 tokens."""
    response = look_at(policy, new(), number, ids, prompt_length)
    means = {}
    for name in ("frozen", "tts"):
        rounds = list(replay(new(), policy.vocab_size, response, ARMS[name], figures, f"{name}{suffix}"))
        for low in range(0, SHORTER - 199, 200):
            chosen = [r.expected for r in rounds if low <= r.position < low + 200]
            figures[f"acceptance_{name}{suffix}_{low}"].append(sum(chosen) / len(chosen))
        means[name] = sum(r.expected for r in rounds) / len(rounds)
        figures[f"acceptance_{name}{suffix}"].append(means[name])
    figures[f"acceptance_gain{suffix}"].append(means["tts"] - means["frozen"])
    say(f"prompt {number}{suffix}: {means}")


if __name__ == "__main__":
    main()
