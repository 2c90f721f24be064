"""Files outside ``docs/`` on the site: each that a page links to is a page below ``source/``, and links lead there."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

HOME = "source"
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")
_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml", ".sh": "bash"}
_PICTURES = {".png", ".svg"}


def reachable(root: Path, pages: Iterable[Path]) -> list[Path]:
    """Every file and folder outside ``docs/`` that these pages lead to, directly or through one another."""
    waiting, seen = list(pages), set[Path]()
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        waiting += [path for path in _targets(page) if path.is_relative_to(root) and path.exists()]
    return sorted(path for path in seen if not path.is_relative_to(root / "docs"))


def _targets(page: Path) -> Iterator[Path]:
    if page.is_dir():
        yield from (path for path in page.iterdir() if path.is_file())
    elif page.suffix == ".md":
        for target in _LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in target:
                yield Path(os.path.normpath(page.parent / target))


def is_text(path: Path) -> bool:
    """Whether it becomes a page; what does not is copied."""
    return path.suffix not in _PICTURES


def address(root: Path, path: Path) -> str:
    """Where on the site a file of the repository is."""
    inside = path.relative_to(root).as_posix()
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    if path.is_dir():
        return f"{HOME}/{inside}/folder.md"
    return f"{HOME}/{inside}" + ("" if path.suffix in {".md", *_PICTURES} else ".md")


def origin(root: Path, page: str) -> Path | None:
    """The file behind a page of the site that was written by hand; None: there is none, the page was made."""
    path = root / page.removeprefix(f"{HOME}/") if page.startswith(f"{HOME}/") else root / "docs" / page
    return path if path.is_file() else path.parent if path.name == "folder.md" else None


def content(path: Path) -> str:
    """A page that shows the file: Markdown as itself, a folder as a list, all else as text."""
    if path.is_dir():
        listed = sorted(one.name for one in path.iterdir() if one.is_file())
        return f"# {path.name}\n\n" + "".join(f"- [{name}]({name})\n" for name in listed)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    return f"# {path.name}\n\n~~~~~~{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n~~~~~~\n"


def led(root: Path, origin: Path, page: str, markdown: str) -> str:
    """The text with every link to a file of the repository led to its place on the site."""
    folder = origin if origin.is_dir() else origin.parent

    def place(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[1]))
        if "://" in match[1] or not target.is_relative_to(root) or not target.exists():
            return match[1]
        return posixpath.relpath(address(root, target), posixpath.dirname(page))

    return _LINK.sub(place, markdown)


def parted(markdown: str) -> str:
    """A blank line before a list that follows a line of text at once: Python-Markdown wants one."""
    lines, coded = list[str](), False
    for line in markdown.split("\n"):
        last = lines[-1] if lines else ""
        coded ^= line.lstrip().startswith(("```", "~~~"))
        if not coded and _ITEM.match(line) and last.strip() and not (_ITEM.match(last) or last.startswith(" ")):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
