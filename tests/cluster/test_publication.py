"""What a version label promises: the weights of that batch, and no later ones."""

from __future__ import annotations

import asyncio
from pathlib import Path

from slipstream.cluster.flow import Flow
from slipstream.cluster.publication import Publisher
from slipstream.cluster.telemetry import Telemetry
from slipstream.cluster.transport import Publication
from slipstream.core.records import WeightVersion
from slipstream.core.rundir import RunDirectory
from slipstream.core.schema import Recipe, Schedule

RECIPE = Recipe.model_validate(
    {"name": "trial", "model": {"path": "builtin:tiny"}, "data": {"source": "builtin:number_sorting"}}
)


def test_the_learner_is_asked_for_its_weights_before_a_next_step_can_reach_it(tmp_path: Path) -> None:
    """The learner serves calls in order: an export that is submitted after the next step would send that step's weights under
    the version before it.  So the call must be in the queue when ``start`` returns, whatever the event loop does then."""
    calls: list[str] = []

    class Recorded:
        async def connect(self) -> None:
            pass

        def export(self) -> str:
            calls.append("export")
            return "weights"

        async def send(self, version: WeightVersion, exported: str) -> Publication:
            await asyncio.sleep(0)
            calls.append(f"send {version}")
            return Publication(version, 8, 0.1, 0.01, 0)

    flow = Flow(Schedule(max_staleness=1, groups_per_step=1, group_size=2), WeightVersion(0, 0))

    async def confirmed(version: WeightVersion) -> None:
        assert flow.confirmed == version, "the slots of its batch are free when the engines' waiters hear of it"
        calls.append(f"confirmed {version}")

    async def story(telemetry: Telemetry) -> None:
        publisher = Publisher(Recorded(), flow, telemetry, confirmed)
        async with asyncio.TaskGroup() as loops:
            for batch in (1, 2):
                flow.learner = WeightVersion(0, batch)
                await publisher.start(flow.learner, loops)
                calls.append("train")

    with RunDirectory.create(tmp_path, RECIPE) as run:
        asyncio.run(story(Telemetry(run, "trial", [])))
    assert calls == ["export", "train", "send 0.1", "confirmed 0.1", "export", "train", "send 0.2", "confirmed 0.2"]


def test_a_publication_is_measured_once(tmp_path: Path) -> None:
    """Weights after every second step only: pauses of 0.1, 0.2 and 0.3 s, each counted once; five came before this attempt."""
    pauses = iter([0.1, 0.2, 0.3])

    class Timed:
        async def connect(self) -> None:
            pass

        def export(self) -> None:
            pass

        async def send(self, version: WeightVersion, exported: None) -> Publication:
            return Publication(version, 8, 1.0, next(pauses), 0)

    async def confirmed(version: WeightVersion) -> None:
        pass

    async def story(telemetry: Telemetry) -> None:
        flow = Flow(Schedule(max_staleness=1, groups_per_step=1, group_size=2), WeightVersion(0, 0))
        publisher = Publisher(Timed(), flow, telemetry, confirmed, count=5)
        for batch in range(1, 8):
            telemetry.step(batch, publisher.metrics())
            if batch % 2 == 0:
                flow.learner = WeightVersion(0, batch)
                await publisher.publish(flow.learner)
        assert publisher.count == 8

    with RunDirectory.create(tmp_path, RECIPE) as run:
        asyncio.run(story(telemetry := Telemetry(run, "trial", [])))
        lines = run.read("metrics").records
    assert [line.get("weights/pause_s") for line in lines] == [None, None, 0.1, None, 0.2, None, 0.3]
    assert dict(telemetry.histogram("weights/pause_s")) == {100_000: 1, 200_000: 1, 300_000: 1}
    assert telemetry.latest["weights/pause_s"] == 0.3, "the display shows the newest"


def test_held_out_rows_of_a_file_may_not_change() -> None:
    """A larger `monitor.eval.size` would test on rows that were trained on; generated tasks are divided by their text."""
    import pytest

    from slipstream.cluster.fixed import fixed_keys, require_same

    def with_size(recipe: Recipe, size: int) -> Recipe:
        evaluation = recipe.monitor.eval.model_copy(update={"size": size})
        return recipe.model_copy(update={"monitor": recipe.monitor.model_copy(update={"eval": evaluation})})

    require_same(with_size(RECIPE, 1000), fixed_keys(RECIPE))
    of_file = RECIPE.model_copy(update={"data": RECIPE.data.model_copy(update={"source": "rows.jsonl"})})
    with pytest.raises(ValueError, match=r"monitor\.eval\.size: got 1000"):
        require_same(with_size(of_file, 1000), fixed_keys(of_file))
