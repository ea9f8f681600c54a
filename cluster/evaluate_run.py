"""``slipstream eval``: the held-out score of a checkpoint, by a fresh engine on the exported weights."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import ray

from slipstream.cluster.actors import RunPlace
from slipstream.cluster.cursor import held_out_tasks
from slipstream.cluster.drafts import saved_drafts
from slipstream.cluster.evaluation import Encoded, EvalResult, Evaluator
from slipstream.cluster.faults import cause, describe
from slipstream.cluster.fixed import require_same
from slipstream.cluster.fleet import Fleet
from slipstream.cluster.flow import Flow
from slipstream.cluster.launch import RunFailed, ray_session
from slipstream.cluster.learners import LearnerGroup
from slipstream.cluster.models import draft_folder
from slipstream.cluster.pulse import Pulse, watch
from slipstream.cluster.recovery import last_checkpoint
from slipstream.cluster.staging import staging
from slipstream.cluster.telemetry import Telemetry
from slipstream.core.mistakes import UserError
from slipstream.core.records import WeightVersion
from slipstream.core.rundir import RunDirectory
from slipstream.trainer.checkpoint import export_model


def evaluate_run(path: Path, overrides: Sequence[str], say: Callable[[str], None]) -> EvalResult:
    """Export the last checkpoint of ``path``, start engines on it, ask every held-out task once.

    ``say`` is told what is waited for.  The result is also an ``eval`` event of the run.  Raises UserError if there is no
    checkpoint or no held-out task, RunFailed if an engine fails, or nothing is answered for ``cluster.stall_timeout_s``.
    """
    with RunDirectory.open(path, write=True) as run, tempfile.TemporaryDirectory() as scratch:
        recipe = run.recipe(overrides)
        if not recipe.monitor.eval.size:
            raise UserError("monitor.eval.size: got 0, expected a number of tasks; give monitor.eval.size=256")
        checkpoint, version, state = last_checkpoint(run)
        require_same(recipe, state["fixed"], ("data.", "monitor.eval."))  # or held-out rows would be rows that were trained on
        say(f"reading the checkpoint of step {version.batch}")
        model = Path(scratch) / "model"
        export_model(checkpoint, model)
        tasks = held_out_tasks(recipe, model)
        if not tasks:
            raise UserError("monitor.eval: not one held-out prompt fits; raise model.max_length or data.max_prompt_tokens")
        telemetry = Telemetry(run, recipe.name, ())
        fleet = Fleet(recipe, RunPlace(f"{recipe.name}-eval-{os.getpid()}", str(run.logs), str(run.search_path())))
        say("starting Ray")
        with staging(fleet.place.run_id), ray_session(recipe):
            pulse = Pulse()
            evaluator = Evaluator(recipe.monitor.eval, tasks, fleet, Flow(recipe.schedule, version), telemetry, pulse.beat)
            try:
                drafts = saved_drafts(checkpoint)
                return asyncio.run(_evaluate(fleet, evaluator, pulse, model, version, tasks, telemetry, drafts, say))
            except (ray.exceptions.RayError, TimeoutError) as failure:
                if isinstance(cause(failure), UserError):
                    raise UserError(str(cause(failure))) from failure
                raise RunFailed(describe(failure)) from failure


async def _evaluate(
    fleet: Fleet,
    evaluator: Evaluator,
    pulse: Pulse,
    model: Path,
    version: WeightVersion,
    tasks: Sequence[Encoded],
    telemetry: Telemetry,
    drafts: Sequence[Path],
    say: Callable[[str], None],
) -> EvalResult:
    try:
        draft_path = draft_folder(fleet.recipe)
        say("starting the engine (a minute, mostly vLLM loading itself)")
        await fleet.start(model, version, tasks[0][0], "mapped", draft_path, drafts)
        pulse.beat()
        say(f"sampling {len(tasks)} answers")
        await _watched(evaluator.run(version.batch), pulse, fleet)
        return telemetry.evaluations[-1]
    finally:
        await fleet.stop()


async def _watched(evaluation: Coroutine[Any, Any, None], pulse: Pulse, fleet: Fleet) -> None:
    """An evaluation without a learner, until it ends or ``watch`` ends it.  Raises what either of them raises."""
    nobody = LearnerGroup(fleet.recipe, fleet.place)
    limit_s = fleet.recipe.cluster.stall_timeout_s
    try:
        async with asyncio.TaskGroup() as loops:
            watching = loops.create_task(watch(pulse, fleet, nobody, limit_s, lambda: "evaluating a checkpoint"))
            await evaluation
            watching.cancel()
    except ExceptionGroup as problems:
        raise problems.exceptions[0] from None
