"""The user's own classes and functions, ``module:name``, in a file beside the recipe or installed.  Standard library only."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from slipstream.core.mistakes import UserError


def load(name: str, search_path: str | Path | None, kind: str) -> Any:
    """What ``name`` (``dice:Dice``) means; its module may stand in ``search_path``.

    Raises UserError if it cannot be imported, with the ``kind`` ("Class", "function") that was expected.
    """
    folder = str(Path(search_path).resolve()) if search_path is not None else None
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)  # last: a random.py beside a recipe must not shadow the standard library
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        expected = f"expected module:{kind} beside the recipe or installed"
        raise UserError(f"{name} cannot be imported ({error}); {expected}") from error
