"""Tests that a page names as ``path::name``: whether each is there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@functools.cache
def tests_in(path: Path) -> frozenset[str]:
    """The names of all test functions of a file; none where there is no file."""
    if not path.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = (node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return frozenset(name for name in found if name.startswith("test_"))


def missing(text: str) -> list[str]:
    """Those that the text names and that are not there."""
    return [f"{path}::{name}" for path, name in NAMED.findall(text) if name not in tests_in(ROOT / path)]


def rows(text: str) -> list[list[str]]:
    """The cells of every row of the text's tables, without heads and lines."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if not row[-1].startswith(("held by", "shown by"))]
