"""The environment that every process of the tests starts in, as Slipstream's own actors get it; set before anything heavy is imported."""

import os

from slipstream.core.environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)
