"""Files that the documents name: each is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
FOLDERS = "decentral|tests|examples|experiments|docs"
EXAMPLE = re.compile(r".*/(test_)?mine\.py")  # a method that somebody is going to write
GROUPS = {
    f"decentral/{name}"
    for name in ("aggregation", "commands", "compressors", "feedback", "optimizers", "pages", "transports")
}  # of entry points, written with a dot
SOURCES = [path for folder in ("decentral", "tests") for path in (ROOT / folder).rglob("*.py")]


def named(text: str) -> set[str]:
    """Paths from the repository's root, and dotted modules, as paths."""
    paths = set(re.findall(rf"(?<![\w./-])((?:{FOLDERS})/[\w./-]*\w)", text))
    modules = {name.replace(".", "/") for name in re.findall(r"`(decentral(?:\.[a-z_]\w*)+)[`.(]", text)}
    return paths | (modules - GROUPS)


def is_there(name: str) -> bool:
    """A file, a folder, a module, or a name that a module has."""
    path = ROOT / name
    module, package = path.parent.with_suffix(".py"), path.parent / "__init__.py"
    return (
        path.exists()
        or path.with_name(f"{path.name}.py").exists()
        or says(module, path.name)
        or says(package, path.name)
    )


def says(module: Path, name: str) -> bool:
    return module.exists() and re.search(rf"\b{re.escape(name)}\b", module.read_text(encoding="utf-8")) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path):
    text = page.read_text(encoding="utf-8")
    assert [name for name in sorted(named(text)) if not (is_there(name) or EXAMPLE.fullmatch(name))] == []
    short = re.findall(r"`((?:[a-z_0-9]+/)?[a-z_0-9]+\.py)`", text)
    assert [name for name in short if not any(f"/{name}" in path.as_posix() for path in SOURCES)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_somewhere(page: Path):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), f"{target}#{anchor}"


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    found = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}
