"""Swarms of round machines, see tests/lab/machines.py."""

from tests.lab.machines import make_swarm

__all__ = ["make_swarm"]
