"""Test-Time Speculation: the draft learns from the verdicts of the rounds since its last update, in the engine's worker."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.core.speculation import TestTimeSpeculation
from slipstream.distill.divergences import forward_kl
from slipstream.rollout.speculation.following import Following
from slipstream.rollout.speculation.loss import draft_loss, position_weights
from slipstream.rollout.speculation.placement import Placement
from slipstream.rollout.speculation.runner_v1 import Forward, Round
from slipstream.rollout.speculation.student import Student
from slipstream.rollout.speculation.watchdog import Watchdog

log = logging.getLogger("slipstream")

Publish = Callable[[Iterable[tuple[str, Tensor]]], None]
WEIGHTS, STATE = "draft.safetensors", "draft.json"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_KEPT = ("lr", "age", "policy_batch", "learned_batch")
SNAPSHOT_EVERY = 20
"""Updates between two snapshots of the draft.  The kill switch restores the last but one, which has proved itself; whenever one
has, a rate that was halved doubles again."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """An update that may still run: what its loss and its gradient's norm will be, and the policy's batch when it began."""

    loss: Tensor
    norm: Tensor
    policy_batch: int


class Updater:
    """Sees every round (``observe``), and updates and publishes the draft between two of them.

    ``busy_s`` tells the seconds that the engine has worked so far, updates included; ``tokens`` is K; ``max_length`` bounds a
    request.  The watchdog counts the first ``watched`` drafts of a round (all by default): where rounds differ in how many they
    draft, more would compare unlike things.  Raises ValueError if not even one request fits into ``max_memory_mib``.
    """

    def __init__(
        self,
        settings: TestTimeSpeculation,
        student: Student,
        placement: Placement,
        publish: Publish,
        busy_s: Callable[[], float],
        *,
        tokens: int,
        max_length: int,
        watched: int | None = None,
    ) -> None:
        self._settings = settings
        self._watched = watched or tokens
        self._student = student
        self._placement = placement
        self._publish = publish
        self._busy_s = busy_s
        self._decay = settings.decay or float(tokens)
        self.lr = settings.lr
        self._optimizer = self._new_optimizer()
        self.watchdog = Watchdog(settings.baseline_rounds, settings.kill_below)
        self._following = Following(settings, student, placement, tokens=tokens, max_length=max_length)
        self._rounds = 0
        self._verified = False
        self._pending: _Pending | None = None
        self._good = self._candidate = self._copy()
        self.refused: str | None = None
        self.updates = self.kills = self.postponed = 0
        self.age = 0
        """Updates behind this draft, those before a resume included."""
        self.update_s = self._last_s = 0.0
        self.loss = math.nan
        self.policy_batch = self.learned_batch = 0
        self._accepted = 0

    @property
    def reads_features(self) -> bool:
        return self._student.reads_features

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self._student.parameters(), lr=self.lr, fused=True)

    # ---- what happens each round

    def observe(self, verification: Round, running: set[str]) -> None:
        """Learn from a verification; at an update, publish before the next drafts are proposed."""
        if self.refused:
            return
        if verification.probs_RV is not None:  # otherwise they are vLLM's fillers, near the longest length, and nobody's drafts
            self.watchdog.count([min(one.accepted, self._watched) + 1 for one in verification.judged])
            self._accepted += sum(one.accepted for one in verification.judged)
        with torch.inference_mode(False), torch.no_grad():
            if self._pending is not None and self._placement.done:
                self._land()
            elif self._pending is None and self.watchdog.rings:
                self._restore("worse than at rest")
            with_proposed = bool(self._settings.proximal) or not self._verified
            self._following.learn(verification, running, with_proposed=with_proposed)
            self._rounds += 1
            if self._rounds < self._settings.every:
                return
            late = self._pending is not None
            if self._verified and (self.watchdog.resting or late or not self._affordable()):
                self.postponed += not (self.watchdog.resting or late)
                self._following.forget()
                return
            self._rounds = 0
            if not self._verified:
                with self._placement.update():
                    self._verify()
                self._placement.wait()
                self._pay(self._placement.seconds)
            elif any(request.lessons for request in self._following.requests.values()):
                with self._placement.update():
                    self._pending = self._update()
                if self._placement.done:
                    self._land()

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

    def _update(self) -> _Pending:
        """One step of Adam on the lessons so far; its figures are not waited for."""
        with torch.enable_grad():
            learnt = list(self._following.rows())
            ks = torch.cat([torch.arange(1, len(now) + 1, device=now.device) for now, _ in learnt])
            proposed = [lesson.proposed_KV for _, lesson in learnt if lesson.proposed_KV is not None]
            target_RV = torch.cat([lesson.target_KV for _, lesson in learnt])
            loss = draft_loss(
                torch.cat([now for now, _ in learnt]),
                target_RV,
                torch.cat(proposed) if self._settings.proximal else None,
                position_weights(ks, self._decay),
                self._settings.proximal,
            )
            self._optimizer.zero_grad()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._student.parameters(), self._settings.max_grad_norm)
        self._optimizer.step()
        return _Pending(loss.detach(), norm, self.policy_batch)

    def _land(self) -> None:
        """An update has ended: publish it, or undo it."""
        landed, self._pending = self._pending, None
        assert landed is not None
        self._placement.join()
        loss, norm = landed.loss.item(), landed.norm.item()
        if wrong := self._wrong(loss, norm):
            self._pay(self._placement.seconds)
            self._restore(wrong)
            return
        started = time.perf_counter()
        self._publish(self._student.weights())
        self._pay(self._placement.seconds + time.perf_counter() - started)
        self.updates, self.age = self.updates + 1, self.age + 1
        self.loss = loss
        self.learned_batch = landed.policy_batch
        if self.updates % SNAPSHOT_EVERY == 0 and self.watchdog.content:
            self._good, self._candidate = self._candidate, self._copy()
            self._set_rate(min(2 * self.lr, self._settings.lr))

    def _wrong(self, loss: float, norm: float) -> str | None:
        """Why an update that has ended is to be undone."""
        weights = torch.nn.utils.get_total_norm(self._student.parameters()).item()  # ten times as fast as asking each number
        if not all(map(math.isfinite, (loss, norm, weights))):
            return f"loss {loss:.3g}, gradient norm {norm:.3g}, weights' norm {weights:.3g}"
        return "worse than at rest" if self.watchdog.rings else None

    def _set_rate(self, lr: float) -> None:
        self.lr = lr
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def _pay(self, seconds: float) -> None:
        """Of one update, its publication included."""
        self._last_s = seconds
        self.update_s += seconds

    def _settle(self) -> None:
        """Wait for an update that still runs."""
        if self._pending is not None:
            self._placement.wait()
            self._land()

    # ---- the kill switch, and new policy weights

    def _copy(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._student.parameters()]

    def _restore(self, why: str) -> None:
        """Back to the last draft that proved itself, with half the rate."""
        self.kills += 1
        self.lr /= 2
        lengths = f"acceptance length {self.watchdog.average:.3f}, at rest {self.watchdog.baseline:.3f}"
        log.warning("draft restored: %s (%s); its rate is now %g", why, lengths, self.lr)
        for parameter, good in zip(self._student.parameters(), self._good, strict=True):
            parameter.detach().copy_(good)
        self._candidate = self._good
        self._publish(self._student.weights())
        self._optimizer = self._new_optimizer()
        self._following.requests.clear()  # their prefixes may come from a draft gone wrong
        self.watchdog.restart()

    def new_policy(self, batch: int, refilled: bool = False) -> None:
        """The target has new weights: Adam's moments were of another loss; what counts as good may have moved.

        ``refilled``: the engine's caches are filled anew, the draft's among them.  After a resume the policy that comes first
        is the one that the draft has learnt from.
        """
        self._following.new_policy(refilled)
        if batch == self.policy_batch:
            return
        self.policy_batch = batch
        self._optimizer = self._new_optimizer()
        self.watchdog.new_policy()

    # ---- what engines share

    def lend(self, file: Path) -> int:
        """Write the draft's weights to ``file`` (safetensors); returns the draft tokens accepted since the last time.

        A draft that has become worse is restored first; one at rest has nothing to teach, so that its tokens do not count.
        """
        self._settle()
        if self.watchdog.rings:
            self._restore("worse than at rest")
        save_file({name: weight.contiguous() for name, weight in self._student.weights()}, file)
        accepted, self._accepted = self._accepted, 0
        return 0 if self.watchdog.resting else accepted

    def adopt(self, file: Path) -> None:
        """Go on from the weights in ``file``, which ``lend`` and averaging made; moments and figures stay."""
        self._settle()
        if not self._verified:  # what the draft before has proposed says nothing about the copy of this one
            self._following.requests.clear()
            self._rounds = 0
        self._take(self._student.parameters(), load_file(file))
        self._publish(self._student.weights())

    def _take(self, into: Iterable[Tensor], weights: Mapping[str, Tensor]) -> None:
        for (name, _), tensor in zip(self._student.weights(), into, strict=True):
            tensor.detach().copy_(weights[name])

    # ---- checkpoints

    def save(self, folder: Path) -> None:
        """Draft, the last one that proved itself, Adam's moments and the watchdog's figures, as safetensors and JSON."""
        self._settle()
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name, _ in self._student.weights()]
        tensors = {f"draft.{name}": weight.contiguous() for name, weight in self._student.weights()}
        tensors |= {f"good.{name}": good.contiguous() for name, good in zip(names, self._good, strict=True)}
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
        self._take(self._student.parameters(), {name: tensors[f"draft.{name}"] for name in names})
        self._good, self._candidate = self._copy(), self._copy()
        self._take(self._good, {name: tensors[f"good.{name}"] for name in names})
        self._optimizer = self._new_optimizer()
        groups = self._optimizer.state_dict()["param_groups"]
        kept = {i: {part: tensors[f"{part}.{n}"] for part in _MOMENTS} for i, n in enumerate(names) if f"step.{n}" in tensors}
        self._optimizer.load_state_dict({"state": kept, "param_groups": groups})
        self._publish(self._student.weights())

    def report(self) -> dict[str, Any]:
        """``refused``, and the fields of ``Learning``."""
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
            "policy_batch": self.policy_batch,
            "learned_batch": self.learned_batch,
        }
