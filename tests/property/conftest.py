"""How hypothesis runs: the same examples every time by default, many new ones on demand.

``NESTSP_HYPOTHESIS=explore pytest tests/property`` searches with fresh random examples.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("quick", _COMMON, max_examples=50, derandomize=True)
settings.register_profile("explore", _COMMON, max_examples=2000)
settings.load_profile(os.environ.get("NESTSP_HYPOTHESIS", "quick"))
