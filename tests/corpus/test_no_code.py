"""Bytes of others never run as code: nothing in the package could, and reading hostile ones does nothing like it."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.corpus.make import entries
from tests.fuzz.targets import TARGETS
from tests.kit.builders import Entry

SOURCES = sorted((Path(__file__).parents[2] / "decentral").rglob("*.py"))
PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code"}
DOWNLOADS = {"urllib.request", "http.client", "requests", "httpx", "ftplib", "huggingface_hub", "wget", "aiohttp"}
RUN = {"exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pickle.find_class"}
REACHED = {"marshal.loads", "ctypes.dlopen", "socket.connect", "urllib.Request", "os.remove", "shutil.rmtree"}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def calls(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Builtins by their name, functions as ``module.name``, methods as ``.name``; and the keywords that are true."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "")
            if isinstance(node.func, ast.Attribute):
                name = f"{getattr(node.func.value, 'id', '')}.{node.func.attr}"
            constants = [key for key in node.keywords if isinstance(key.value, ast.Constant)]
            yield name, {str(key.arg) for key in constants if key.value.value is True}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def sources() -> list[tuple[Path, set[str], list[tuple[str, set[str]]]]]:
    """Each module, what it imports, and what it calls."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert len(trees) > 300
    return [(path, set(imports(tree)), list(calls(tree))) for path, tree in trees.items()]


def test_nothing_in_the_package_unpickles_evaluates_or_runs_a_shell(sources) -> None:
    for path, imported, called in sources:
        assert not {name.partition(".")[0] for name in imported} & PICKLES, path
        for name, switched_on in called:
            assert name not in {"eval", "exec", "compile", "__import__", "torch.load", "os.system"}, path
            assert not switched_on & {"shell", "trust_remote_code", "allow_pickle"}, path


def test_a_script_is_run_in_one_place_which_is_the_one_that_the_user_names_it_to(sources) -> None:
    assert [path.name for path, imported, _ in sources if "runpy" in imported] == ["runs.py"], "join --script"


def test_nothing_in_the_package_downloads_but_a_text_from_where_the_terms_say(sources) -> None:
    opened = [called for _, _, calls in sources for called in calls if called[0].endswith(".from_pretrained")]
    assert opened, "what opens a model of transformers is found"
    assert all("local_files_only" in switched_on for _, switched_on in opened)
    assert [path.name for path, imported, _ in sources if imported & DOWNLOADS] == ["text.py"]


def test_reading_hostile_bytes_runs_nothing_and_reaches_for_nothing() -> None:
    """The first reading imports what it needs; the second may neither compile nor start, load, connect nor remove."""
    hostile = entries()
    read(hostile)
    seen, watching = list[str](), [True]
    sys.addaudithook(lambda event, _: seen.append(event) if watching[0] and event in RUN | REACHED else None)
    try:
        read(hostile)
        assert set(seen) <= {"os.remove", "shutil.rmtree"}, "scratch folders of the readers of files"
        eval("1 + 1")
        assert "compile" in seen, "the hook hears of it"
    finally:
        watching[0] = False


def read(hostile: list[Entry]) -> None:
    for target, _, data, _ in hostile:
        with contextlib.suppress(TARGETS[target].refusal):
            TARGETS[target].read(data)
