"""``slipstream eval``: the held-out score of a checkpoint, by a fresh engine on the exported weights."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ray

from slipstream.cluster.actors import RunPlace
from slipstream.cluster.drafts import draft_folder, saved_drafts
from slipstream.cluster.evaluation import EvalResult, Evaluator
from slipstream.cluster.faults import cause, describe
from slipstream.cluster.fleet import Fleet
from slipstream.cluster.flow import Flow
from slipstream.cluster.launch import RunFailed, ray_session
from slipstream.cluster.recovery import CACHE, held_out_tasks, last_checkpoint, require_same
from slipstream.cluster.staging import staging
from slipstream.cluster.telemetry import Telemetry
from slipstream.core.records import Task, WeightVersion
from slipstream.core.rundir import RunDirectory
from slipstream.trainer.checkpoint import export_model


def evaluate_run(path: Path, overrides: Sequence[str]) -> EvalResult:
    """Export the last checkpoint of ``path``, start engines on it, ask every held-out task once.

    The result is also an ``eval`` event of the run.  Raises ValueError if there is no checkpoint or no held-out task, RunFailed
    if an engine fails.
    """
    with RunDirectory.open(path, write=True) as run, tempfile.TemporaryDirectory() as scratch:
        recipe = run.recipe(overrides)
        if not recipe.monitor.eval.size:
            raise ValueError("monitor.eval.size: got 0, expected a number of tasks; give monitor.eval.size=256")
        checkpoint, version = last_checkpoint(run)
        require_same(recipe, checkpoint, ("data.", "monitor.eval."))  # or held-out rows would be rows that were trained on
        model = Path(scratch) / "model"
        export_model(checkpoint, model)
        tasks = held_out_tasks(recipe, model)
        if not tasks:
            raise ValueError("monitor.eval: not one held-out prompt fits; raise model.max_length or data.max_prompt_tokens")
        telemetry = Telemetry(run, recipe.name, ())
        fleet = Fleet(recipe, RunPlace(f"{recipe.name}-eval-{os.getpid()}", str(run.logs), str(run.search_path())))
        with staging(fleet.place.run_id), ray_session(recipe):
            evaluator = Evaluator(recipe.monitor.eval, tasks, fleet, Flow(recipe.schedule, version), telemetry, lambda: None)
            try:
                drafts = saved_drafts(checkpoint)
                return asyncio.run(_evaluate(fleet, evaluator, model, version, tasks[0][0], telemetry, drafts))
            except (ray.exceptions.RayError, TimeoutError) as failure:
                if isinstance(cause(failure), ValueError):
                    raise ValueError(str(cause(failure))) from failure
                raise RunFailed(describe(failure)) from failure


async def _evaluate(
    fleet: Fleet,
    evaluator: Evaluator,
    model: Path,
    version: WeightVersion,
    first_task: Task,
    telemetry: Telemetry,
    drafts: Sequence[Path],
) -> EvalResult:
    try:
        draft_path = draft_folder(fleet.recipe, CACHE)
        await fleet.start(str(model), version, first_task, "mapped", draft_path, drafts)
        await evaluator.run(version.batch)
        return telemetry.evaluations[-1]
    finally:
        await fleet.stop()
