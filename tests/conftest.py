"""Every process of the tests starts in the environment of Slipstream's own actors, set before anything heavy is imported."""

import os

from slipstream.core.environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)
