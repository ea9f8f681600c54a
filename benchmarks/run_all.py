"""Every benchmark, one after the other; the results lie in benchmarks/results."""

from __future__ import annotations

import subprocess
import sys

from common import HERE, arguments, say

BENCHMARKS = (
    "engine_overhead",
    "engine_equals_learner",
    "weight_sync",
    "async_vs_sync",
    "vs_trl",
    "staleness",
    "distillation",
    "algorithms",
    "speculative_rl",
    "lookahead",
    "tts",
)


def main() -> None:
    extra = ["--quick"] if arguments(__doc__).quick else []
    failed = []
    for name in BENCHMARKS:
        say(name)
        if subprocess.run([sys.executable, str(HERE / f"{name}.py"), *extra]).returncode:
            failed.append(name)
    if failed:
        say(f"failed: {', '.join(failed)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
