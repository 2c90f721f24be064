"""Bytes of others never run as code: nothing in the package could, and reading hostile ones does nothing like it."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.corpus.make import FOLDER
from tests.corpus.test_corpus import FILES
from tests.fuzz.targets import TARGETS

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


def calls(tree: ast.AST) -> Iterator[str]:
    """Builtins by their name, functions of a module as ``module.name``, and keywords that open a door."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id
            elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                yield f"{node.func.value.id}.{node.func.attr}"
            for keyword in node.keywords:
                if isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
                    yield f"{keyword.arg}=True"


def test_nothing_in_the_package_unpickles_evaluates_or_runs_a_shell() -> None:
    assert len(SOURCES) > 300
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not {name.partition(".")[0] for name in imports(tree)} & PICKLES, path
        doors = {"eval", "exec", "compile", "__import__", "torch.load", "os.system"}
        assert not set(calls(tree)) & {*doors, "shell=True", "trust_remote_code=True", "allow_pickle=True"}, path


def test_a_script_is_run_in_one_place_which_is_the_one_that_the_user_names_it_to() -> None:
    runs = [path.name for path in SOURCES if "runpy" in imports(ast.parse(path.read_text(encoding="utf-8")))]
    assert runs == ["runs.py"], "join --script"


def test_nothing_in_the_package_downloads() -> None:
    opened = 0
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not set(imports(tree)) & DOWNLOADS, path
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained":
                assert "local_files_only=True" in calls(call), path
                opened += 1
    assert opened, "what opens a model of transformers is found"


def test_reading_hostile_bytes_runs_nothing_and_reaches_for_nothing() -> None:
    """The first reading imports what it needs; the second may neither compile nor start, load, connect nor remove."""
    read_all()
    seen, watching = list[str](), [True]
    sys.addaudithook(lambda event, _: seen.append(event) if watching[0] and event in RUN | REACHED else None)
    try:
        read_all()
        assert set(seen) <= {"os.remove", "shutil.rmtree"}, "scratch folders of the readers of files"
        eval("1 + 1")
        assert "compile" in seen, "the hook hears of it"
    finally:
        watching[0] = False


def read_all() -> None:
    for target, path, _ in FILES:
        with contextlib.suppress(TARGETS[target].refusal):
            TARGETS[target].read((FOLDER / path).read_bytes())
