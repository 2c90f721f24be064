"""Real nodes in memory, see tests/kit/nodes.py; one of them lies."""

from tests.kit.nodes import run_lab, terms

__all__ = ["run_lab", "terms"]
