"""How torchft's lighthouse is started, as its README does; without torchft, which another Python has."""

from __future__ import annotations

LIGHTHOUSE = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
PORT = 29510  # the lighthouse's own default
