"""The dynamic lookahead against every fixed one, over acceptance rates, batch sizes and two machines.

A simulation: what a round takes is a formula with 3 % noise, and whether a draft is accepted a throw of dice, so that a
difference of 3 % can be seen at all.  The chooser is the one that runs in the engine (rollout/speculation/lookahead.py), and is
told of times and verdicts only.  Chances fall by 5 % from one draft position to the next.

worst_ratio_to_best_fixed    tokens per second of `dynamic` over those of the best fixed γ, in the worst case (aim: ≥ 0.97)
median_ratio_to_best_fixed   the same in the median case
gain_over_worst_fixed        over the worst fixed γ, in the median case
ratio_after_a_change         two halves with different acceptance: over the best single γ for both
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from common import arguments, finish, say

from slipstream.rollout.speculation.lookahead import Lookahead

MOST = 6
NOISE = 0.03
FALL = 0.95


@dataclass(frozen=True)
class Machine:
    """Seconds: of the target, ``base`` and ``per_token``; of the draft, per step and per row of a step."""

    base: float
    per_token: float
    step: float
    per_row: float


MACHINES = {
    "cpu": Machine(
        base=100e-3, per_token=18e-3, step=6e-3, per_row=2e-3
    ),  # SmolLM2-135M on one core verifies 5 tokens in 1.9 × 1
    "gpu": Machine(base=10e-3, per_token=0.02e-3, step=1e-3, per_row=0.002e-3),
}
BATCHES = (1, 4, 16, 64)
ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.9)


def tokens_per_s(machine: Machine, batch: int, alphas: Sequence[float], fixed: int | None, rounds: int, seed: int) -> float:
    """``alphas``: the chance of a first draft, in equal parts of the rounds.  ``fixed``: γ, or None for dynamic."""
    dice = random.Random(seed)
    chooser = Lookahead(MOST)
    seconds, tokens, gamma = 0.0, 0, MOST if fixed is None else fixed
    for done in range(rounds):
        alpha = alphas[done * len(alphas) // rounds]
        verify_s = (machine.base + machine.per_token * batch * (1 + gamma)) * (1 + NOISE * dice.gauss(0, 1))
        verified = batch * (1 + gamma)
        for _ in range(batch):
            accepted = 0
            while accepted < gamma and dice.random() < alpha * FALL**accepted:
                accepted += 1
            tokens += accepted + 1
            chooser.judged(gamma, accepted)
        gamma = chooser.choose(batch) if fixed is None else fixed
        draft_s = gamma * (machine.step + machine.per_row * batch) * (1 + NOISE * dice.gauss(0, 1))
        chooser.took(verified, verify_s, batch * gamma, draft_s)
        seconds += verify_s + draft_s
    return tokens / seconds


def main() -> None:
    quick = arguments(__doc__).quick
    rounds, seeds = (1500, 1) if quick else (4000, 3)
    worst, middle, gains, changes = [], [], [], []
    for seed in range(seeds):
        to_best, over_worst = [], []
        for name, machine in MACHINES.items():
            for batch in BATCHES:
                for alpha in ALPHAS:
                    fixed = [tokens_per_s(machine, batch, [alpha], gamma, rounds, seed) for gamma in range(MOST + 1)]
                    dynamic = tokens_per_s(machine, batch, [alpha], None, rounds, seed)
                    to_best.append(dynamic / max(fixed))
                    over_worst.append(dynamic / min(fixed))
                    say(f"{name}, {batch} requests, α {alpha}: {to_best[-1]:.3f} of the best, γ = {fixed.index(max(fixed))}")
                both = [0.2, 0.9]
                best = max(tokens_per_s(machine, batch, both, gamma, rounds, seed) for gamma in range(MOST + 1))
                changes.append(tokens_per_s(machine, batch, both, None, rounds, seed) / best)
        worst.append(min(to_best))
        middle.append(median(to_best))
        gains.append(median(over_worst))
    figures = {
        "worst_ratio_to_best_fixed": worst,
        "median_ratio_to_best_fixed": middle,
        "gain_over_worst_fixed": gains,
        "ratio_after_a_change": changes,
    }
    finish("lookahead", figures, quick, rounds=rounds, simulated=True)


if __name__ == "__main__":
    main()
