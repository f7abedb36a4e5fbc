"""How long tests wait before they take something to hang."""

from __future__ import annotations

HANGS_S = 900.0
"""Seconds after which something is taken to hang: a busy machine needs minutes for what an idle one does in seconds."""
