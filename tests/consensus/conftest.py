"""Swarms of round machines, see tests/kit/machines.py."""

from tests.kit.machines import make_swarm

__all__ = ["make_swarm"]
