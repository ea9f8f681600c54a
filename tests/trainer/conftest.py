"""Fixtures of the learner's tests: a process group of one, the tiny model, recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.core import schema


@pytest.fixture(scope="session")
def alone() -> Iterator[None]:
    """This process is the only rank of a learner."""
    import torch

    from slipstream.trainer import distributed

    torch.set_num_threads(1)
    distributed.join(0, 1, "127.0.0.1", distributed.free_port(), timeout_s=60)
    yield
    distributed.leave()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `builtin:tiny`, seed 0."""
    from slipstream.trainer.model import resolve_model

    return resolve_model(schema.Model(path="builtin:tiny"), 0, tmp_path_factory.mktemp("models"))


@pytest.fixture
def recipe(tiny: Path) -> Callable[..., schema.Recipe]:
    """Recipes for the tiny model; keyword arguments replace whole sections."""

    def build(**sections: Any) -> schema.Recipe:
        defaults = {"name": "test", "model": {"path": str(tiny)}, "data": {"source": "builtin:number_sorting"}}
        return schema.Recipe.model_validate({**defaults, **sections})

    return build
