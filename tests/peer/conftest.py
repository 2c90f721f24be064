"""Real nodes in memory, see tests/lab/nodes.py."""

from tests.lab.nodes import run_lab

__all__ = ["run_lab"]
