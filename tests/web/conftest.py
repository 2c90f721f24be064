"""A Chromium of this system, and axe-core: make test-web brings both."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

AXE = Path(__file__).parent / "node_modules/axe-core/axe.min.js"
expect.set_options(timeout=60_000)  # ms: on a busy machine a page takes more than the usual 5 s
DESK, PHONE = {"width": 1200, "height": 900}, {"width": 390, "height": 844}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shots", type=Path, default=None, help="keep screenshots in this folder")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program is not None, "make test-web needs a Chromium: apt-get install chromium"
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


class Look:
    """One viewer, and what its browser complained of."""

    def __init__(self, browser: Browser, shots: Path | None, *, dark: bool = False, phone: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.page: Page = browser.new_page(viewport=PHONE if phone else DESK, color_scheme=scheme)  # type: ignore[arg-type]
        self.page.set_default_timeout(120_000)
        self.complaints: list[str] = []
        self._shots = shots
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._note)
        self.asked: set[str] = set()

    def _note(self, request: Any) -> None:
        self.asked.add(request.url.split("/")[2])

    def shoot(self, name: str, *, whole: bool = False) -> None:
        """Keep what it looks like, where somebody wants to see."""
        if self._shots is not None:
            self._shots.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=self._shots / f"{name}.png", full_page=whole)

    def serious(self) -> list[str]:
        """What axe-core finds that keeps somebody out. It is evaluated, not loaded: the policy lets no script in."""
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("async () => (await axe.run()).violations")
        grave = [one for one in found if one["impact"] in ("serious", "critical")]
        return [f"{one['id']}: {node['target']} {node['failureSummary']}" for one in grave for node in one["nodes"]]

    def is_too_wide(self) -> bool:
        """Whether the page is to be moved sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))


@pytest.fixture
def look(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Any]:
    opened: list[Look] = []

    def look(**how: bool) -> Look:
        opened.append(Look(browser, request.config.getoption("--shots"), **how))
        return opened[-1]

    yield look
    for one in opened:
        one.page.close()
