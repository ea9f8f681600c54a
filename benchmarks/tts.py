"""Test-Time Speculation on SmolLM2-135M: a frozen draft against one that learns while it serves, on the same responses.

Replay: the policy's responses are recorded once, with the hidden states; every arm then replays them.  A token x of the
policy's was accepted from a draft q with probability min(1, q(x) / p(x)) (speculative sampling is exact), so a replay gives
the acceptance that the arm would have had, with the same random numbers for all arms.  The drafts, an
EAGLE-3 head and a small model, are made by `slipstream draft train` on other, short responses.  EOS is not sampled, so that
responses are long.

acceptance_<arm>_<from>        expected tokens per round, in bins of 250 tokens of the response
acceptance_gain_long           tts − frozen beyond 500 tokens, per prompt
acceptance_gain_early          the same within the first 400 tokens
acceptance_gain_novel          the same over rounds none of whose drafted tokens ends 5 that stood in the response before
acceptance_gain_novel_start    the same over rounds whose first drafted token does not
acceptance_gain_after_drift    tts − frozen on responses of a policy that was fine-tuned on Python source, with the same head
..._model                      each of these with a small model as draft, the policy's first layers
<gain>_mean, _standard_error   of each of these gains, over prompts
drift_nats                     log-probability per token that the fine-tuning gave those responses
repeated_share                 of the frozen draft's rounds, those with a drafted token that ends such a repetition
update_s_<arm>                 seconds of one update of the head, and of the drafts before it (one thread)

Live: two prompts, one request at a time, in the engine; responses go on past EOS.

tokens_ratio_<arm>_vs_none_<n>     tokens per second over those without speculation, at n tokens of the response
tokens_ratio_vs_frozen_<n>         those of tts over the frozen head
live_acceptance_<arm>              tokens per round of the target, those without drafts included
update_cost_share                  of the engine's working time
..._batch4                         four requests at a time, 250 tokens each
..._dynamic, ..._model             head and lookahead: dynamic, and the small model as draft
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from common import arguments, finish, prepare_environment, say
from tts_live import live, live_batch, speculations
from tts_policy import MOVED, PROMPTS, TEMPERATURE, TOKENS, fine_tuned, load_policy, made_head, made_model, record
from tts_replay import ARMS, Drafter, HeadDrafter, ModelDrafter, Response, Round, look_at, replay, replay_ngram

BIN = 250
SHORTER, SHORT_BIN = 600, 200
"""Responses of the policy that was fine-tuned."""
PAIR = ("frozen", "tts")
NOVEL = {"novel": "repeated", "novel_start": "begins_repeated"}
Drafts = Mapping[str, Callable[[], Drafter]]
"""A new one of each, by the suffix of its figures."""
Rounds = dict[str, list[Round]]
"""Of each arm."""


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
        arms = {
            arm: keys for arm, keys in speculations(head_path, model_path).items() if arm in ("none", *(options.arms or [arm]))
        }
        numbers = options.prompts or ([3] if quick else [2, 3])
        live(tokenizer, arms, figures, (400,) if quick else (400, 1000), numbers)
        if not (quick or options.prompts):
            live_batch(tokenizer, arms, figures)
    if not options.live:
        embedding = policy.get_input_embeddings().weight
        drafts: Drafts = {"": lambda: HeadDrafter(head_path, embedding), "_model": lambda: ModelDrafter(model_path)}
        prompts, length = ([0, 3], 600) if quick else ([*range(len(PROMPTS))], 1250)
        replay_own(policy, tokenizer, drafts, figures, prompts, length)
        replay_moved(policy, tokenizer, drafts, figures, prompts[: 1 if quick else 4])
        record_spread(figures)
    setup = {"model": "SmolLM2-135M-Instruct", "drafts": made, "tokens": TOKENS, "temperature": TEMPERATURE}
    part = "_replay" if options.replay else "_live" if options.live else ""
    finish(f"tts{part}{'_some' if options.arms or options.prompts else ''}", figures, quick, **setup)


def extend(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--replay", action="store_true", help="nothing live")
    parts.add_argument("--live", action="store_true", help="no replay")
    arms = [*speculations(Path(), Path())]
    parser.add_argument("--arms", nargs="+", choices=arms, help="of the live part, besides `none` (default: all)")
    parser.add_argument("--prompts", nargs="+", type=int, help="of the live part, 0 to 5 (default: 2 and 3), and no batch")


def replay_own(
    policy: Any, tokenizer: Any, drafts: Drafts, figures: dict[str, list[float]], prompts: list[int], length: int
) -> None:
    """Every arm on the policy's own responses; an update every round on the first of them alone."""
    for suffix, new in drafts.items():
        for number, ids, prompt_length in record(policy, tokenizer, prompts, length, "own"):
            response = look_at(policy, new(), number, ids, prompt_length)
            every_round = ("tts_every_round",) if number == 0 and not suffix else ()
            rounds = replay_arms(response, policy.vocab_size, (*PAIR, *every_round), new, figures, suffix)
            if not suffix:
                rounds["ngram"] = list(replay_ngram(response))
            record_lengths(figures, rounds, length, BIN, suffix)
            record_gains(figures, rounds, suffix)


def replay_moved(policy: Any, tokenizer: Any, drafts: Drafts, figures: dict[str, list[float]], prompts: list[int]) -> None:
    """The same drafts for a policy that has moved since they were made."""
    moved = fine_tuned(policy, tokenizer, **MOVED)
    for number, ids, prompt_length in record(moved, tokenizer, prompts, SHORTER, "moved"):
        after, before = (look_at(model, drafts[""](), number, ids, prompt_length).logp_R for model in (moved, policy))
        figures["drift_nats"].append((after - before).mean().item())
        say(f"prompt {number}: moved by {figures['drift_nats'][-1]:.3f} nats per token")
        for suffix, new in drafts.items():
            response = look_at(moved, new(), number, ids, prompt_length)
            rounds = replay_arms(response, moved.vocab_size, PAIR, new, figures, f"{suffix}_after_drift")
            record_lengths(figures, rounds, SHORTER, SHORT_BIN, f"{suffix}_after_drift")
            figures[f"acceptance_gain{suffix}_after_drift"].append(mean(rounds["tts"]) - mean(rounds["frozen"]))


def replay_arms(
    response: Response,
    vocabulary: int,
    arms: Iterable[str],
    new: Callable[[], Drafter],
    figures: dict[str, list[float]],
    suffix: str,
) -> Rounds:
    rounds = {arm: list(replay(new(), vocabulary, response, ARMS[arm], figures, f"{arm}{suffix}")) for arm in arms}
    say(f"prompt {response.prompt}{suffix}: { {arm: round(mean(of_arm), 3) for arm, of_arm in rounds.items()} }")
    return rounds


def mean(rounds: Iterable[Round], low: float = 0, high: float = float("inf"), without: str = "") -> float:
    """Expected tokens per round, of those that begin within ``low`` to ``high`` and are not what ``without`` names."""
    chosen = [r.expected for r in rounds if low <= r.position < high and not (without and getattr(r, without))]
    return fmean(chosen) if chosen else float("nan")


def record_lengths(figures: dict[str, list[float]], rounds: Rounds, length: int, width: int, suffix: str) -> None:
    """Acceptance lengths in bins of the response, and overall."""
    for arm, of_arm in rounds.items():
        for low in range(0, length - width + 1, width):
            figures[f"acceptance_{arm}{suffix}_{low}"].append(mean(of_arm, low, low + width))
        figures[f"acceptance_{arm}{suffix}"].append(mean(of_arm))


def record_gains(figures: dict[str, list[float]], rounds: Rounds, suffix: str) -> None:
    """TTS − frozen, over long and early parts of a response and over new text."""
    parts: dict[str, dict[str, Any]] = {"long": {"low": 500}, "early": {"high": 400}}
    for name, without in NOVEL.items():
        parts[name] = {"without": without}
        for arm, of_arm in rounds.items():
            figures[f"acceptance_{name}_{arm}{suffix}"].append(mean(of_arm, without=without))
    for name, part in parts.items():
        frozen, learning = (mean(rounds[arm], **part) for arm in PAIR)
        figures[f"acceptance_gain_{name}{suffix}"].append(learning - frozen)
    figures[f"repeated_share{suffix}"].append(fmean(r.repeated for r in rounds["frozen"]))


def record_spread(figures: dict[str, list[float]]) -> None:
    """Mean and standard error of each gain over prompts."""
    for gain in [name for name in figures if name.startswith("acceptance_gain")]:
        figures[f"{gain}_mean"].append(fmean(figures[gain]))
        if len(figures[gain]) > 1:
            figures[f"{gain}_standard_error"].append(stdev(figures[gain]) / len(figures[gain]) ** 0.5)


if __name__ == "__main__":
    main()
