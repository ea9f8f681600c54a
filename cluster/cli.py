"""The command ``slipstream``.  Nothing heavy is imported before it is needed, so ``validate`` and ``--help`` answer at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream.core.mistakes import UserError

app = typer.Typer(
    name="slipstream",
    help="RL post-training and on-policy distillation of language models with asynchronous rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
out = Console()
err = Console(stderr=True)

RUNS = Path("runs")
USER_ERROR, RUN_ERROR, INTERRUPTED = 2, 1, 130
RecipeFiles = Annotated[
    list[str], typer.Argument(metavar="RECIPE... [a.b=c ...]", help="YAML files, merged left to right, then overrides")
]


def _existing_run(path: Path) -> Path:
    from slipstream.core.rundir import require_run

    require_run(path, RUNS)
    return path


RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="a run directory, such as runs/quickstart", callback=_existing_run)
]


def main() -> None:
    """Entry point.  Exit codes: 2 for a mistake of the user's, 1 for a run that failed, 130 for one that was interrupted.

    A fault of ours ends with its traceback, and code 1.
    """
    try:
        app()
    except UserError as mistake:
        _tell("error", mistake)
        sys.exit(USER_ERROR)
    except RuntimeError as failure:
        _tell("failed", failure)
        sys.exit(RUN_ERROR)


def _tell(what: str, problem: Exception) -> None:
    err.print(f"[bold red]{what}:[/] {_plain(problem)}", highlight=False, soft_wrap=True)
    for note in getattr(problem, "__notes__", ()):
        err.print(_plain(note), highlight=False, soft_wrap=True)


def _plain(message: object) -> str:
    from rich.markup import escape

    return escape(str(message))


def _recipe(arguments: list[str], *, draft_to_come: bool = True) -> tuple[Any, Path]:
    """The recipe of files and overrides, and the directory of the last file (where user functions and data may stand)."""
    from slipstream.cluster.presence import absent, located
    from slipstream.core.recipe import load_recipe

    files = [Path(a) for a in arguments if "=" not in a]
    beside = files[-1].resolve().parent if files else Path.cwd()
    overrides = [a for a in arguments if "=" in a]
    recipe = load_recipe(files, overrides, lambda found: absent(found, beside, draft_to_come=draft_to_come))
    return located(recipe, beside), beside


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        out.print(f"slipstream {importlib.metadata.version('slipstream-rl')}", highlight=False)
        raise typer.Exit


@app.callback()
def _slipstream(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version, and end")
    ] = False,
) -> None:
    pass


@app.command()
def validate(recipe: RecipeFiles) -> None:
    """Check a recipe: every mistake at once, in under two seconds, with nothing started and nothing of the user's imported.

    [dim]slipstream validate recipes/quickstart.yaml schedule.steps=20[/]
    """
    found, _ = _recipe(recipe)
    out.print(f"[green]valid[/]: {found.name}, {found.algo.name} on {found.data.source}, {found.schedule.steps} steps")
    theirs = [found.rollout.environment.name, *(part.function for part in found.reward.parts)]
    if theirs := [name for name in theirs if ":" in name]:
        out.print(f"not checked yet (your code is only imported by `run`): {', '.join(theirs)}", highlight=False)


@app.command()
def run(
    recipe: RecipeFiles,
    runs: Annotated[Path, typer.Option(help="where run directories are made")] = RUNS,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no live display")] = False,
) -> None:
    """Train as a recipe says.  Ctrl-C ends the run after the step at hand, with a checkpoint and exit code 130.

    [dim]slipstream run recipes/quickstart.yaml
    slipstream run recipes/quickstart.yaml name=sync schedule.max_staleness=0[/]
    """
    from slipstream.core.rundir import RunDirectory

    found, search_path = _recipe(recipe, draft_to_come=False)
    directory = RunDirectory.create(runs, found)
    directory.close()
    _launch_and_tell(found, directory.path, resume=False, search_path=search_path, quiet=quiet)


@app.command()
def resume(
    path: RunPath,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c ...]")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no live display")] = False,
) -> None:
    """Go on with a run from its last checkpoint; overrides may extend it.

    [dim]slipstream resume runs/quickstart
    slipstream resume runs/quickstart schedule.steps=200[/]
    """
    from slipstream.core.rundir import RunDirectory

    with RunDirectory.open(path, write=True) as directory:  # refused at once where the run is still being written
        found = directory.recipe(overrides or [])
        search_path = directory.search_path()
    _launch_and_tell(found, path, resume=True, search_path=search_path, quiet=quiet)


def _launch_and_tell(found: Any, path: Path, *, resume: bool, search_path: Path, quiet: bool) -> None:
    from slipstream.cluster.launch import RunFailed, launch
    from slipstream.cluster.progress import final_table

    try:
        summary = launch(found, path, resume=resume, search_path=search_path, quiet=quiet)
    except (RunFailed, UserError) as failure:
        if path.exists():
            failure.add_note(_where_to_look(path))
        raise
    stopped = summary["status"] == "interrupted"
    out.print(final_table(summary))
    report_file = _report(path)
    out.print(f"report   {report_file}", soft_wrap=True)
    out.print("next:", style="bold")
    for command in (
        f"audit {path}",
        f"eval {path}",
        f"export {path} {path / 'model'}" if _checkpoints(path) else "",
        f"resume {path}" + ("" if stopped else f" schedule.steps={2 * found.schedule.steps}"),
    ):
        if command:
            out.print(f"  {_called()} {command}", soft_wrap=True, highlight=False)
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _where_to_look(path: Path) -> str:
    """What a failed run has left, and how it goes on; with its report, if that can be written at all."""
    lines = [f"run      {path}", f"logs     {path / 'logs'}"]
    with contextlib.suppress(Exception):  # the report is a courtesy: nothing may hide why the run failed
        lines.append(f"report   {_report(path)}")
    if _checkpoints(path):
        lines += ["next:", f"  {_called()} resume {path}"]
    return "\n".join(lines)


def _checkpoints(path: Path) -> list[Path]:
    return sorted((path / "checkpoints").glob("step-*"))


def _called() -> str:
    """How to call this command again: by its name where that finds it, otherwise by the path that was used."""
    program = Path(sys.argv[0])
    found = shutil.which("slipstream")
    if program.name != "slipstream" or (found is not None and Path(found).resolve() == program.resolve()):
        return "slipstream"
    return os.path.relpath(program) if program.resolve().is_relative_to(Path.cwd()) else str(program)


@app.command()
def audit(path: RunPath) -> None:
    """Recompute the staleness bound and the sample ledger from a run's own records; exit code 1 if they do not hold.

    [dim]slipstream audit runs/quickstart[/]
    """
    from slipstream.core.audit import audit as check

    report = check(path)
    out.print(report.render(), highlight=False, markup=False)
    if not report.ok:
        raise typer.Exit(RUN_ERROR)


@app.command()
def report(path: RunPath) -> None:
    """Write report.html of a run: one static file.

    [dim]slipstream report runs/quickstart[/]
    """
    out.print(str(_report(path)), soft_wrap=True)


def _report(path: Path) -> Path:
    """Build the report; the last checkpoint's tokenizer spells the tokens of its samples."""
    from slipstream.cluster.report import build_report

    models = sorted((path / "checkpoints").glob("step-*/learner/model"))
    if not models:
        return build_report(path)
    from slipstream.trainer.model import load_tokenizer

    return build_report(path, load_tokenizer(models[-1]).decode)


@app.command()
def export(path: RunPath, target: Annotated[Path, typer.Argument(metavar="OUT", help="the folder to write")]) -> None:
    """Write the last checkpoint's policy as a plain Hugging Face folder (safetensors, tokenizer, chat template).

    [dim]slipstream export runs/quickstart models/sorter[/]
    """
    from slipstream.trainer.checkpoint import export_model, latest

    checkpoint, warnings = latest(path / "checkpoints")
    for warning in warnings:
        err.print(_plain(warning))
    if checkpoint is None:
        raise UserError(f"{path}: no checkpoint to export; expected checkpoints/step-*")
    export_model(checkpoint, target)
    out.print(f"wrote {target}", soft_wrap=True)


@app.command("eval")
def evaluate(
    path: RunPath,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c ...]")] = None,
) -> None:
    """Held-out score of a run's last checkpoint, sampled by a fresh engine from the exported weights.

    [dim]slipstream eval runs/quickstart monitor.eval.size=1000[/]
    """
    from slipstream.cluster.progress import Waiting

    with Waiting() as waiting:
        waiting.say("loading")
        from slipstream.cluster.evaluate_run import evaluate_run

        result = evaluate_run(path, overrides or [], waiting.say)
    error = "" if result.standard_error is None else f" ± {result.standard_error:.4f}"
    failed = f", failed {result.failed}" if result.failed else ""
    how = f"standard error, n = {result.n}{failed}; sampling {result.seconds:.1f} s"
    out.print(f"{result.metric} {result.score:.4f}{error} ({how})", soft_wrap=True, highlight=False)


draft_app = typer.Typer(help="Drafts for speculative decoding.", no_args_is_help=True)
app.add_typer(draft_app, name="draft")


@draft_app.callback()
def _draft() -> None:
    """Drafts for speculative decoding."""


@draft_app.command("train")
def draft_train(
    recipe: RecipeFiles, quiet: Annotated[bool, typer.Option("--quiet", "-q", help="no progress bar")] = False
) -> None:
    """Make the draft that `rollout.speculation` names, from the policy's own responses.

    [dim]slipstream draft train recipes/smollm2_grpo.yaml "rollout.speculation={method: eagle3, draft: models/head}"[/]
    """
    import os

    from slipstream.cluster.progress import Stages
    from slipstream.core.environment import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    found, _ = _recipe(recipe)
    from slipstream.cluster.draft_run import train_draft

    with Stages(quiet=quiet) as stages:
        made = train_draft(found, stages.update)
    out.print(
        f"wrote {made.path}: {made.parameters:,} parameters, {made.samples} responses, {made.seconds:.0f} s", soft_wrap=True
    )
    by_position = " ".join(f"{share:.2f}" for share in made.accepted)
    out.print(f"expected acceptance length {made.length_before:.2f} → {made.length_after:.2f}, by position {by_position}")


@app.command()
def doctor() -> None:
    """What this machine can run: packages, devices, memory, shared memory, ports.

    [dim]slipstream doctor[/]
    """
    from slipstream.cluster.doctor import examine

    findings = examine()
    for finding in findings:
        mark = {"ok": "[green]ok[/]  ", "note": "[yellow]note[/]", "bad": "[red]bad[/] "}[finding.level]
        out.print(f"{mark}  {finding.what}", highlight=False, soft_wrap=True)
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(RUN_ERROR)


if __name__ == "__main__":
    main()
