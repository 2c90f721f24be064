"""docs/quickstarts/, literally: what stands before and after is run as it is, in a swarm of two over loopback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from decentral.cli.demo_processes import DemoProcess, Family
from decentral.observe.status import read_status
from tests.docs.commands import FENCE
from tests.examples.two_peers import NET, ROOT
from tests.kit.families import NET as NET_TYPED
from tests.kit.families import family
from tests.kit.patience import PATIENCE, until

__all__ = ["family"]

PAGES = sorted((ROOT / "docs/quickstarts").glob("*.md"))
NEW = "# new"
HELD_TO_LOOPBACK = f"""
import runpy, sys
from decentral.peer.settings import handed_over

del sys.argv[0]
with handed_over({NET | {"transport": "native"}!r}):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_not_marked_as_new_stood_there_before(page: Path) -> None:
    before, after = (text.splitlines() for text in blocks(page, "python"))
    old = iter([line.strip() for line in before])
    kept = [line.strip() for line in after if line.strip() and NEW not in line]
    assert [line for line in kept if line not in old] == []
    assert len(after) - len(kept) <= 25


def unsaid(said: str, screen: str) -> list[str]:
    """Lines of ``screen`` that nobody said; numbers are others each time."""
    patterns = {line: re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", re.escape(line)) for line in screen.splitlines()}
    return [
        line
        for line, one in patterns.items()
        if not re.search(one.replace(r"\.\.\.", ".*").replace("kB", "[kM]B"), said)
    ]


NEEDS = {"lora": "peft", "lightning": "lightning", "trainer": "transformers", "fsdp": "accelerate"}


def first_peer(typed: str) -> list[str]:
    if typed == "python train.py":
        return [sys.executable, "-u", "-c", HELD_TO_LOOPBACK, "train.py"]
    assert typed == "torchrun --standalone --nproc_per_node 2 train.py"
    Path("held.py").write_text(HELD_TO_LOOPBACK)
    return [sys.executable, "-m", "torch.distributed.run", *typed.split()[1:-1], "held.py", "train.py"]


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "notebook"], ids=lambda page: page.stem)
def test_before_and_after_run_as_they_stand_and_show_what_the_page_says(
    family: Family, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip(NEEDS.get(page.stem, "torch"))
    if page.stem == "lora":  # the folder and the text that the page takes for granted
        assert request.getfixturevalue("tiny_folder") == tmp_path / "base"
        (tmp_path / "text.txt").write_text("".join(f"{n} and {n + 1} and " for n in range(400)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    before, after = blocks(page, "python")
    alone = subprocess.run([sys.executable, "-c", before], capture_output=True, text=True, timeout=PATIENCE)
    assert alone.returncode == 0, alone.stderr

    Path("train.py").write_text(after)
    *terms, first, second = blocks(page, "")[0].replace("\\\n", "").splitlines()
    for line in terms:
        subprocess.run([sys.executable, "-m", *line.split()], check=True)
    one = family.start_command("one", Path("said-one"), first_peer(first))
    until(lambda: bool(invites(one)) or not one.running)
    typed = second.split()
    assert typed[:3] == ["decentral", "join", "INVITE"]
    other = family.start("other", Path("said-other"), ["join", invites(one)[0], *typed[3:], *NET_TYPED])
    assert family.wait([one, other], PATIENCE), all_said(one)
    assert [peer.process.returncode for peer in (one, other)] == [0, 0], all_said(one) + all_said(other)
    ends = [read_status(path.parent) for path in tmp_path.glob("*/status.json")]
    assert len(ends) == 2
    assert ends[0].anchor_digest == ends[1].anchor_digest != ""
    assert all(end.rounds_contributed > 0 for end in ends)
    (screen,) = blocks(page, "text")
    assert unsaid(all_said(one), screen) == []


def all_said(peer: DemoProcess) -> str:
    return "".join((peer.directory / f"{name}.txt").read_text() for name in ("stderr", "stdout"))


def invites(peer: DemoProcess) -> list[str]:
    return re.findall(r"decentral join (decentral1:\S+)", all_said(peer))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the notebook's own machinery
def test_two_notebooks_of_the_cells_of_the_page_end_with_the_same_model(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    page = next(page for page in PAGES if page.stem == "notebook")
    before, after = blocks(page, "python")
    held = (
        f"from decentral.peer.settings import handed_over\nhanded_over({NET | {'transport': 'native'}!r}).__enter__()"
    )
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    one = family.start_command("one", Path("said"), [sys.executable, "-u", "-c", f"{held}\n{after}"])
    invite = one.first_line(PATIENCE)
    for cells in ([before], [held, after.replace("INVITE = None", f"INVITE = {json.dumps(invite)}")]):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        where = {"metadata": {"path": str(tmp_path / "other")}}
        nbclient.NotebookClient(notebook, timeout=int(PATIENCE), resources=where).execute()
    assert one.process.wait(PATIENCE) == 0, all_said(one)
    ends = [read_status(path.parent) for path in tmp_path.glob("*/*/status.json")]
    assert len(ends) == 2
    assert ends[0].anchor_digest == ends[1].anchor_digest != ""
    (screen,) = blocks(page, "text")
    assert unsaid(all_said(one), screen) == []
