"""The package in totals, held against ``house.toml``: python -m tools.house

Totals and no maxima: a limit on the length of a file is met by cutting, and cut files are what a reader cannot find his
way through. Exits with 1 where a total has risen, or has fallen and the file does not say so yet.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "tools" / "house.toml"
# Beside the core: nobody needs it for a round, and no other part of the package has to import it.
# With these a docstring is no sentence of what a function does or a thing is: a verb begins the one, a noun the other.
NO_FIRST_WORDS = ("What", "Whether", "Who", "Of", "See", "Those", "One")
BESIDE = ("benchmarks", "dashboard", "lab", "simulate", "transport.pylibp2p", "watch")


def figures() -> dict[str, int]:
    """The totals that the file allows, by name."""
    return tomllib.loads(FIGURES.read_text(encoding="utf-8"))


def totals(root: Path = ROOT) -> dict[str, int]:
    """The totals of the sources under ``root``, by the same names, without what only a run can tell."""
    modules = {_dotted(path.relative_to(root)): path for path in sorted((root / "decentral").rglob("*.py"))}
    own = {name for name, path in modules.items() if path.name != "__init__.py"}
    importers: dict[str, set[str]] = defaultdict(set)
    for name in own:
        for target in _imported(modules[name], modules):
            importers[target].add(name)
    return {
        "core_modules": sum(not _is_beside(name) for name in own),
        "all_modules": len(own),
        "core_lines": -(-sum(_lines(modules[name]) for name in own if not _is_beside(name)) // 100) * 100,
        "modules_with_one_importer": sum(len(importers[name] - {name}) == 1 for name in own),
        "folders": len({path.parent for path in modules.values()}),
        "first_words": sum(len(wrong_first_words(path)) for path in modules.values()),
    }


def wrong_first_words(path: Path) -> list[str]:
    """The docstrings of a file that begin with a word that none should begin with."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, documented))
    texts = (ast.get_docstring(node) or "" for node in nodes)
    return [text for text in texts if re.match(rf"({'|'.join(NO_FIRST_WORDS)})\b", text)]


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _is_beside(name: str) -> bool:
    return any(f"{name}.".startswith(f"decentral.{part}.") for part in BESIDE)


def _imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules else node.module


def verdict(name: str, now: int, allowed: int) -> str:
    """One line about a total; empty where it is as the file says."""
    if now > allowed:
        return f"{name} rose from {allowed} to {now}: make room, or raise it in tools/house.toml and say why there"
    if now < allowed:
        return f"{name} fell from {allowed} to {now}: write {now} into tools/house.toml, so that it stays there"
    return ""


def main() -> int:
    """Print every total beside what is allowed."""
    allowed, wrong = figures(), []
    for name, now in totals().items():
        print(f"{name.replace('_', ' '):28} {now:4}")
        wrong.append(verdict(name, now, allowed[name]))
    print(*filter(None, wrong), sep="\n", end="\n" if any(wrong) else "", file=sys.stderr)
    return int(any(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
