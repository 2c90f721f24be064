"""The documentation site: made from what the code says of itself, whole, and without anything of another machine."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from click import Context

import decentral
from decentral import errors
from decentral.cli import main
from decentral.manifest import Manifest
from tools.pages import commands, keys, names, outside

ROOT = Path(__file__).parents[2]
FOREIGN = re.compile(r"^(?:https?:)?//")
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


def test_every_command_and_what_it_says_of_itself_is_in_the_reference():
    page = commands.page()
    for name in main.list_commands(Context(main)):
        assert f"\n## decentral {name}\n" in page
    assert "\n## decentral service install\n" in page, "those below a command, too"
    assert "--require-peers" in page


def test_every_key_of_a_manifest_is_in_the_reference_with_its_comment():
    page = keys.page()
    for name, field in Manifest.model_fields.items():
        assert f"\n## [{name}]\n" in page
        for key, inner in field.annotation.model_fields.items():  # type: ignore[union-attr]
            assert f"\n| `{key}` | " in page or f"\n## [{name}.{key}]\n" in page, f"{name}.{key}"
            assert (inner.description or "").replace("|", "\\|") in page


def test_every_public_name_and_every_error_is_in_the_reference():
    page, tree = names.page(), names.errors_page()
    for name in decentral.__all__:
        if name in errors.__all__:
            assert f"| `{name}` | {getattr(errors, name).exit_code} |" in tree
        elif name != "__version__":
            assert re.search(rf"^::: decentral\.[\w.]*\b{name}$", page, flags=re.MULTILINE), name


def test_a_link_out_of_the_folder_leads_to_a_page_that_shows_the_file():
    origin = ROOT / "docs/methods/sparse.md"
    text = "[a](../../decentral/errors.py) [b](../glossary.md#training) [c](../../SECURITY.md) [d](https://x.org/e)"
    wanted = "[a](../source/decentral/errors.py.md) [b](../glossary.md#training) [c](../source/SECURITY.md) [d](https://x.org/e)"
    assert outside.led(ROOT, origin, "methods/sparse.md", text) == wanted


def test_what_such_a_page_links_to_is_shown_too_and_nothing_outside_the_repository():
    found = outside.reachable(ROOT, [ROOT / "README.md"])
    assert ROOT / "SECURITY.md" in found
    assert all(path.is_relative_to(ROOT) for path in found)


def test_a_list_right_below_a_line_is_parted_from_it_but_not_in_code():
    assert outside.parted("Words\n- one\n- two") == "Words\n\n- one\n- two"
    assert outside.parted("```\nWords\n- one\n```") == "```\nWords\n- one\n```"


def test_the_site_is_built_with_what_developers_have():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(extras["docs"]) <= set(extras["dev"])


def test_every_page_has_its_place_in_the_menu():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    placed = set(leaves(settings["nav"]))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= placed
    assert all(page.startswith(("reference/", "source/")) for page in placed - pages), "the others are made"


def leaves(menu: object) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    elif isinstance(menu, (list, dict)):
        for one in menu if isinstance(menu, list) else menu.values():
            yield from leaves(one)


class Loads(HTMLParser):
    """What a page loads by itself: scripts, styles, pictures; not what a reader may click on."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name == LOADED.get(tag) and value]


def searched(page: Path, word: str) -> str | None:
    """What a browser makes of a page that it opened from its folder to look for a word; None where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        return None
    profile, flags = page.parent / "profile", ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    done = subprocess.run(
        [program, *flags, f"--user-data-dir={profile}", "--virtual-time-budget=20000", f"{page.as_uri()}?q={word}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.long
def test_it_builds_strictly_and_loads_nothing_from_another_machine(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 50
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert [one for one in loads.found if FOREIGN.match(one)] == [], page.name
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style.name
        assert 'javascripts/iframe-worker.js"' in page.read_text(encoding="utf-8"), "searched from a folder, too"
    assert (tmp_path / "search/search_index.js").read_text(encoding="utf-8").startswith("var __index = {")
    found = searched(tmp_path / "methods/sparse.html", "disagreement")
    assert found is None or re.search(r"[1-9]\d* matching documents?", found)
    assert "require_peers" in (tmp_path / "reference/python.html").read_text(encoding="utf-8")
