"""Every process of the tests starts in the environment of Slipstream's own actors, set before anything heavy is imported."""

import os
import signal

import pytest

from slipstream.core.environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)


def pytest_configure() -> None:
    """End in order also on SIGTERM, as `.ci/run` sends it when time is up: fixtures then stop what they started."""
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", returncode=143))
