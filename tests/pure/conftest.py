"""Hypothesis profiles: `ci` (default) draws the same examples every time; `deep` draws fresh ones, many.

    HYPOTHESIS_PROFILE=deep python -m pytest tests/pure

Speed is never a verdict here: a test has no deadline.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.register_profile("deep", deadline=None, max_examples=3_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
