"""Run the journeys of this folder; see program.py."""

import sys

import adoption
import commands
import models
from program import exit_code

MODULES = (commands, adoption, models)
"""Their journeys are registered as they are imported."""

if __name__ == "__main__":
    sys.exit(exit_code())
