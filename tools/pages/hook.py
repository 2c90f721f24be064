"""What mkdocs calls: pages that are made at build time, and links to files outside ``docs/``.

mkdocs loads this file by its path with this folder on ``sys.path``, so its siblings are imported by their bare names.
"""

from __future__ import annotations

from pathlib import Path

import commands
import keys
import names
import outside
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FIXED = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")  # in the menu, linked or not
MADE = {
    "reference/commands.md": commands.page,
    "reference/manifest.md": keys.page,
    "reference/python.md": names.page,
    "reference/errors.md": names.errors_page,
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and every file outside ``docs/`` that a page leads to."""
    for address, made in MADE.items():
        files.append(File.generated(config, address, content=made()))
    written = [ROOT / "docs" / file.src_uri for file in files.documentation_pages() if file.generated_by is None]
    for path in outside.reachable(ROOT, [*written, *(ROOT / name for name in FIXED)]):
        address = outside.address(ROOT, path)
        if outside.is_text(path):
            files.append(File.generated(config, address, content=outside.content(path)))
        else:
            files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the files are on the site, and part lists from the line above, as GitHub does by itself."""
    origin = outside.origin(ROOT, page.file.src_uri)
    return outside.parted(outside.led(ROOT, origin, page.file.src_uri, markdown)) if origin else markdown
