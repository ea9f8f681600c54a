"""Test-Time Speculation: the draft learns from the verdicts of the rounds since its last update, in the engine's worker."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.core.speculation import TestTimeSpeculation
from slipstream.distill.divergences import forward_kl
from slipstream.rollout.speculation.following import Following
from slipstream.rollout.speculation.loss import draft_loss, position_weights
from slipstream.rollout.speculation.runner_v1 import Forward, Round
from slipstream.rollout.speculation.student import Student
from slipstream.rollout.speculation.watchdog import Watchdog

log = logging.getLogger("slipstream")

Publish = Callable[[Iterable[tuple[str, Tensor]]], None]
WEIGHTS, STATE = "draft.safetensors", "draft.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_KEPT = ("lr", "updates", "kills", "postponed", "policy_batch", "learned_batch")
SNAPSHOT_EVERY = 20
"""Updates between two snapshots of the draft.  The kill switch restores the last but one, which has proved itself."""


class Updater:
    """Sees every round (``observe``), and updates and publishes the draft between two of them.

    ``busy_s`` tells the seconds that the engine has worked so far, updates included; ``tokens`` is K; ``max_length`` bounds a
    request.  Raises ValueError if not even one request fits into ``max_memory_mib``.
    """

    def __init__(
        self,
        settings: TestTimeSpeculation,
        student: Student,
        publish: Publish,
        busy_s: Callable[[], float],
        *,
        tokens: int,
        max_length: int,
    ) -> None:
        self._settings = settings
        self._student = student
        self._publish = publish
        self._busy_s = busy_s
        self._decay = settings.decay or float(tokens)
        self.lr = settings.lr
        self._optimizer = self._new_optimizer()
        self.watchdog = Watchdog(settings.baseline_rounds, settings.kill_below)
        self._following = Following(settings, student, tokens=tokens, max_length=max_length)
        self._rounds = 0
        self._verified = False
        self._good = self._candidate = self._copy()
        self.refused: str | None = None
        self.updates = self.kills = self.postponed = 0
        self.update_s = self._last_s = 0.0
        self.loss = math.nan
        self.policy_batch = self.learned_batch = 0

    @property
    def reads_features(self) -> bool:
        return self._student.reads_features

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self._student.parameters(), lr=self.lr)

    # ---- what happens each round

    def observe(self, verification: Round, running: set[str]) -> None:
        """Learn from a verification; at an update, publish before the next drafts are proposed."""
        if self.refused:
            return
        for one in verification.judged:
            self.watchdog.count(one.accepted + 1)
        with torch.inference_mode(False), torch.no_grad():
            with_proposed = bool(self._settings.proximal) or not self._verified
            self._following.learn(verification, running, with_proposed=with_proposed)
            self._rounds += 1
            if self._rounds < self._settings.every:
                return
            if self._verified and (self.watchdog.resting or not self._affordable()):
                self.postponed += not self.watchdog.resting
                self._following.forget()
                return
            self._rounds = 0
            started = time.perf_counter()
            self._update() if self._verified else self._verify()
            self._last_s = time.perf_counter() - started
            self.update_s += self._last_s

    def read(self, forward: Forward) -> None:
        """A forward of the target, for a student that reads its hidden states."""
        with torch.inference_mode(False), torch.no_grad():
            self._following.read(forward)

    def _affordable(self) -> bool:
        """Whether another update as long as the last keeps the share of updates in the engine's time."""
        return self.update_s + self._last_s <= self._settings.max_cost_share * (self._busy_s() + self._last_s)

    # ---- an update

    def _verify(self) -> None:
        """Compare the student with what the engine's draft proposed, before anything is learnt: they must be one model."""
        pairs = [(now, lesson.proposed_KV) for now, lesson in self._following.rows() if lesson.proposed_KV is not None]
        if not pairs:
            return
        now_RV, proposed_RV = (torch.cat(rows) for rows in zip(*pairs, strict=True))
        kl = forward_kl(now_RV, proposed_RV).mean().item()
        if not kl <= self._settings.max_replica_kl:
            self.refused = (
                f"rollout.speculation.tts: the trainable copy of the draft is {kl:.3g} nats from the draft in the engine, "
                f"expected at most max_replica_kl = {self._settings.max_replica_kl:g}; they are not the same model"
            )
            self._following.requests.clear()
        self._verified = True

    def _update(self) -> None:
        with torch.enable_grad():
            learnt = list(self._following.rows())
            if not learnt:
                return
            ks = torch.cat([torch.arange(1, len(now) + 1) for now, _ in learnt])
            proposed = [lesson.proposed_KV for _, lesson in learnt if lesson.proposed_KV is not None]
            target_RV = torch.cat([lesson.target_KV for _, lesson in learnt])
            loss = draft_loss(
                torch.cat([now for now, _ in learnt]),
                target_RV,
                torch.cat(proposed) if self._settings.proximal else None,
                position_weights(ks, self._decay).to(target_RV.device),
                self._settings.proximal,
            )
            self._optimizer.zero_grad()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._student.parameters(), self._settings.max_grad_norm)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())) or self.watchdog.rings:
            self._restore(f"loss {loss.item():.3g}, acceptance length {self.watchdog.average:.3f}")
            return
        self._optimizer.step()
        self._publish(self._student.weights())
        self.updates += 1
        self.loss = loss.item()
        self.learned_batch = self.policy_batch
        if self.updates % SNAPSHOT_EVERY == 0 and self.watchdog.content:
            self._good, self._candidate = self._candidate, self._copy()

    # ---- the kill switch, and new policy weights

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._student.parameters()]

    def _restore(self, why: str) -> None:
        """Back to the last draft that proved itself, with half the rate."""
        self.kills += 1
        self.lr /= 2
        log.warning("draft restored (%s; at rest %.3f); its rate is now %g", why, self.watchdog.baseline, self.lr)
        for parameter, good in zip(self._student.parameters(), self._good, strict=True):
            parameter.detach().copy_(good)
        self._candidate = self._good
        self._publish(self._student.weights())
        self._optimizer = self._new_optimizer()
        self._following.requests.clear()  # their prefixes may come from a draft gone wrong
        self.watchdog.restart()

    def new_policy(self, batch: int) -> None:
        """The target has new weights: Adam's moments were of another loss; what counts as good may have moved."""
        self.policy_batch = batch
        self._optimizer = self._new_optimizer()
        self.watchdog.new_policy()

    # ---- checkpoints

    def save(self, folder: Path) -> None:
        """Draft, Adam's moments and the watchdog's figures, as safetensors and JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name, _ in self._student.weights()]
        tensors = {f"draft.{name}": weight.contiguous() for name, weight in self._student.weights()}
        for index, kept in self._optimizer.state_dict()["state"].items():
            tensors |= {f"{part}.{names[index]}": kept[part] for part in _MOMENTS}
        save_file(tensors, folder / WEIGHTS)
        plain = {name: getattr(self, name) for name in _KEPT}
        (folder / STATE).write_text(json.dumps({**plain, "watchdog": dataclasses.asdict(self.watchdog)}))

    def load(self, folder: Path) -> None:
        """Go on from ``save``, and publish that draft.  Raises ValueError for a folder of another draft."""
        tensors = load_file(folder / WEIGHTS)
        names = [name for name, _ in self._student.weights()]
        saved = {name.removeprefix("draft.") for name in tensors if name.startswith("draft.")}
        if saved != set(names):
            raise ValueError(f"{folder}: the checkpoint's draft has other parameters: {sorted(saved ^ set(names))[:3]} …")
        state = json.loads((folder / STATE).read_text())
        for name in _KEPT:
            setattr(self, name, state[name])
        self.watchdog = Watchdog(**state["watchdog"])
        for name, parameter in zip(names, self._student.parameters(), strict=True):
            parameter.detach().copy_(tensors[f"draft.{name}"])
        self._optimizer = self._new_optimizer()
        groups = self._optimizer.state_dict()["param_groups"]
        kept = {i: {part: tensors[f"{part}.{n}"] for part in _MOMENTS} for i, n in enumerate(names) if f"step.{n}" in tensors}
        self._optimizer.load_state_dict({"state": kept, "param_groups": groups})
        self._good = self._candidate = self._copy()
        self._publish(self._student.weights())

    def report(self) -> dict[str, Any]:
        return {
            "refused": self.refused,
            "updates": self.updates,
            "kills": self.kills,
            "postponed": self.postponed,
            "loss": self.loss,
            "lr": self.lr,
            "update_s": self.update_s,
            "busy_s": self._busy_s(),
            "baseline": self.watchdog.baseline,
            "average": self.watchdog.average,
            "learned_batch": self.learned_batch,
        }
