"""The process behind ``graders.GraderPool``: built-in graders and the user's, one request at a time.

Every grader has the signature ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, one entry per
sibling; None means that it does not apply.  What graders print goes to stderr; stdout belongs to the protocol.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import pickle
import re
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, BinaryIO

from slipstream.rollout.user_code import load

Scores = list[float | None]


def regex(completions: Sequence[str], answer: Sequence[str], *, pattern: str, **_: Any) -> Scores:
    """1.0 where the group of the last match of ``pattern`` is the answer, without surrounding white space."""
    found = [[match.group(1) or "" for match in re.finditer(pattern, text)] for text in completions]
    return [float(bool(groups) and groups[-1].strip() == gold.strip()) for groups, gold in zip(found, answer, strict=True)]


def math(completions: Sequence[str], answer: Sequence[str], **_: Any) -> Scores:
    """1.0 where math-verify finds the response's final expression equal to the answer.

    Raises ValueError for an answer that is no mathematics.
    """
    from math_verify import parse, verify

    scores: Scores = []
    for text, gold in zip(completions, answer, strict=True):
        expected = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$")
        if not expected:
            raise ValueError(f"got the answer {gold!r}, expected a number or an expression that math-verify reads")
        scores.append(float(verify(expected, parse(text))))
    return scores


def reasoning_gym(completions: Sequence[str], entry: Sequence[dict[str, Any]], dataset: Sequence[str], **_: Any) -> Scores:
    """The data set's own score of the response, between 0 and 1."""
    return [_scorer(name)(text, one) for text, one, name in zip(completions, entry, dataset, strict=True)]


@cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym as gym

    scorer: Callable[[str, dict[str, Any]], float] = gym.get_score_answer_fn(dataset)
    return scorer


BUILT_IN: dict[str, Callable[..., Scores]] = {"regex": regex, "math": math, "reasoning_gym": reasoning_gym}
_WARM = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def resolve(name: str, options: dict[str, Any], search_path: str | None = None) -> Callable[..., Any]:
    """The grader of that name with its options bound.  Raises ValueError if a user's function cannot be imported."""
    if name in BUILT_IN:
        if name in _WARM:
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
                importlib.import_module(_WARM[name])
        return partial(BUILT_IN[name], **options)
    function = load(name, search_path, "function")
    if not callable(function):
        raise ValueError(f"{name} is a {type(function).__name__}, expected a function")
    return partial(function, **options)


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request: ``{"scores": […]}`` or ``{"error": kind, "detail": text}``."""
    parameters = inspect.signature(function).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        arguments = {name: value for name, value in arguments.items() if name in names}
    try:
        result = function(**arguments)
        if inspect.isawaitable(result):
            result = asyncio.run(_wait(result))
    except Exception as error:  # noqa: BLE001 - a grader's fault is contained here: it fails its group, with a traceback
        traceback.print_exc()
        return {"error": "raised", "detail": f"{type(error).__name__}: {error}"}
    if not isinstance(result, list | tuple):
        return {"error": "wrong_result", "detail": f"got a {type(result).__name__}, expected a list of numbers"}
    try:
        return {"scores": [None if score is None else _number(score) for score in result]}
    except (TypeError, ValueError, OverflowError) as error:
        return {"error": "wrong_result", "detail": f"{error}, expected numbers or None"}


async def _wait(result: Any) -> Any:
    return await result


def _number(score: Any) -> float:
    if isinstance(score, str | bytes):
        raise TypeError(f"got the text {score!r}")
    return float(score)


def main() -> None:
    if sys.platform == "linux":  # a grader that hangs would not see its parent's end of the pipe close
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=replies.close)  # or a child of a grader would hold the parent's pipe open
    setup = _receive(requests)
    if setup is None:
        return
    try:
        functions = {name: resolve(name, options, setup["search_path"]) for name, options in setup["graders"]}
    except ValueError as error:
        _reply(replies, {"error": "import", "detail": str(error)})
        return
    _reply(replies, {"ready": True})
    while (request := _receive(requests)) is not None:
        _reply(replies, call(functions[request["function"]], request["arguments"]))


def _receive(stream: BinaryIO) -> Any:
    """The next request, or None when the parent has gone."""
    header = stream.read(8)
    return pickle.loads(stream.read(struct.unpack("<Q", header)[0])) if len(header) == 8 else None


def _reply(stream: BinaryIO, reply: dict[str, Any]) -> None:
    body = json.dumps(reply).encode()
    stream.write(struct.pack("<Q", len(body)) + body)
    stream.flush()


if __name__ == "__main__":
    main()
