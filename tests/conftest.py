"""For every test: wild inputs have no deadline, since a busy machine is no mistake of ours."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("plimsoll", deadline=None)
settings.load_profile("plimsoll")
