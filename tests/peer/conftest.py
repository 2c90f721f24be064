"""Real nodes in memory, see tests/lab/nodes.py."""

from tests.lab.nodes import run_lab, terms

__all__ = ["run_lab", "terms"]
