"""The one seam between the user's mistakes and ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(ValueError):
    """What the user has to mend; the message says what was got, what was expected, and how to fix it.

    The command shows it without a traceback and ends with exit code 2.  Any other exception is a fault of ours or of the
    machine's, a plain ValueError too.
    """


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` for the name that comes nearest, or nothing."""
    near = difflib.get_close_matches(got, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def siblings(path: Path) -> list[str]:
    """Names beside ``path``, which is not there itself, hidden ones aside; none where its folder is not there either."""
    return sorted(other.name for other in path.parent.glob("[!.]*"))
