"""Runs the command by `python -m headrace.cli`."""

import sys

from .command import main

sys.exit(main())
