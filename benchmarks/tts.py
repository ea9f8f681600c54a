"""Test-Time Speculation on SmolLM2-135M: a frozen EAGLE-3 head against one that learns while it serves, on the same responses.

Replay: the policy's responses are recorded once, with the hidden states; every arm then replays them.  A token x of the
policy's was accepted from a draft q with probability min(1, q(x) / p(x)) (speculative sampling is exact), so a replay gives
the acceptance that the arm would have had, with the same random numbers for all arms.  The head is made by `slipstream draft
train` on other, short responses.  EOS is not sampled, so that responses are long.

acceptance_<arm>_<from>        expected tokens per round, in bins of 250 tokens of the response
acceptance_gain_long           tts − frozen beyond 500 tokens, per prompt
acceptance_gain_early          the same within the first 400 tokens
acceptance_gain_novel          the same over rounds that draft no token which ends 5 that stood in the response before
acceptance_gain_after_drift    tts − frozen on responses of a policy that was fine-tuned on Python source, with the same head
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

import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from common import arguments, finish, prepare_environment, say
from tts_live import live, live_batch
from tts_policy import PROMPTS, TEMPERATURE, TOKENS, fine_tuned, load_policy, made_head, record
from tts_replay import ARMS, Round, look_at, replay, replay_ngram

BIN = 250


def main() -> None:
    quick = arguments(__doc__).quick
    prepare_environment()
    torch.set_num_threads(1)
    head_path = made_head()
    policy, tokenizer = load_policy()
    figures: dict[str, list[float]] = defaultdict(list)
    made = json.loads((head_path / "draft.json").read_text())
    figures["acceptance_on_short_responses"].append(made["length_after"])
    live(tokenizer, head_path, figures, (400,) if quick else (400, 1000), (3,) if quick else (2, 3))
    if not quick:
        live_batch(tokenizer, head_path, figures)
    prompts, length = ((0, 3), 600) if quick else (range(len(PROMPTS)), 1250)
    for number, ids, prompt_length in record(policy, tokenizer, list(prompts), length, "own"):
        response = look_at(policy, head_path, number, ids, prompt_length)
        rounds = {}
        for name, arm in ARMS.items():
            if name != "tts_every_round" or number == 0:
                rounds[name] = list(replay(policy, head_path, response, arm, figures, name))
        rounds["ngram"] = list(replay_ngram(response))
        record_figures(figures, rounds, length)
        means = {name: round(sum(r.expected for r in of_arm) / len(of_arm), 3) for name, of_arm in rounds.items()}
        say(f"prompt {number}: {means}, repeated {figures['repeated_share'][-1]:.2f}")
    drifted(policy, tokenizer, head_path, figures, list(prompts)[: 1 if quick else 4], 600)
    for gain in [name for name in figures if name.startswith("acceptance_gain")]:
        figures[f"{gain}_mean"].append(fmean(figures[gain]))
        if len(figures[gain]) > 1:
            figures[f"{gain}_standard_error"].append(stdev(figures[gain]) / len(figures[gain]) ** 0.5)
    setup = {"model": "SmolLM2-135M-Instruct", "draft": made, "tokens": TOKENS, "temperature": TEMPERATURE, "length": length}
    finish("tts", figures, quick, **setup)


def record_figures(figures: dict[str, list[float]], rounds: dict[str, list[Round]], length: int) -> None:
    def mean(arm: str, low: float = 0, high: float = float("inf"), novel: bool = False) -> float:
        chosen = [r.expected for r in rounds[arm] if low <= r.position < high and not (novel and r.repeated)]
        return sum(chosen) / len(chosen) if chosen else float("nan")

    for arm in rounds:
        for low in range(0, length - BIN + 1, BIN):
            figures[f"acceptance_{arm}_{low}"].append(mean(arm, low, low + BIN))
        figures[f"acceptance_{arm}"].append(mean(arm))
        figures[f"acceptance_novel_{arm}"].append(mean(arm, novel=True))
    figures["acceptance_gain_long"].append(mean("tts", 500) - mean("frozen", 500))
    figures["acceptance_gain_early"].append(mean("tts", 0, 400) - mean("frozen", 0, 400))
    figures["acceptance_gain_novel"].append(mean("tts", novel=True) - mean("frozen", novel=True))
    figures["repeated_share"].append(sum(r.repeated for r in rounds["frozen"]) / len(rounds["frozen"]))


# ---- a policy that has moved


def drifted(
    policy: Any, tokenizer: Any, head_path: Path, figures: dict[str, list[float]], prompts: list[int], length: int
) -> None:
    moved = fine_tuned(policy, tokenizer)
    for number, ids, prompt_length in record(moved, tokenizer, prompts, length, "moved"):
        response = look_at(moved, head_path, number, ids, prompt_length)
        before = look_at(policy, head_path, number, ids, prompt_length)
        figures["drift_nats"].append((response.logp_R - before.logp_R).mean().item())
        means = {}
        for name in ("frozen", "tts"):
            rounds = list(replay(moved, head_path, response, ARMS[name], figures, f"{name}_after_drift"))
            for low in range(0, length - 199, 200):
                chosen = [r.expected for r in rounds if low <= r.position < low + 200]
                figures[f"acceptance_{name}_after_drift_{low}"].append(sum(chosen) / len(chosen))
            means[name] = sum(r.expected for r in rounds) / len(rounds)
        figures["acceptance_gain_after_drift"].append(means["tts"] - means["frozen"])
        say(f"after drift, prompt {number}: {means}, moved by {figures['drift_nats'][-1]:.3f} nats per token")


if __name__ == "__main__":
    main()
