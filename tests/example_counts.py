"""Says how many examples of a property hypothesis tries: a third in the shorter tiers of what `make test-all` tries."""

from __future__ import annotations

import os

LONG = "HEADRACE_TESTS_LONG"
"""Name of the environment variable that `conftest.py` sets where tests marked `slow` are selected, too."""
SHORT_SHARE = 3
LEAST = 10


def examples(count: int) -> int:
    """Return `count` where slow tests are selected, else a third of it, LEAST at least."""
    return count if os.environ.get(LONG) else max(LEAST, count // SHORT_SHARE)
