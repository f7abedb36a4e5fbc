"""Time limit after which tests assume that a process hangs."""

from __future__ import annotations

HANGS_S = 900.0
"""Seconds after which a test assumes a hang. A busy machine needs minutes where an idle one needs seconds."""
