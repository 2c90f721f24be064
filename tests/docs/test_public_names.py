"""Names that people use: those that the pages import are public, on the reference page, and typed."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

import decentral
from decentral import errors
from decentral.integrations import lightning, transformers
from tools.pages import names

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = sorted((ROOT / "examples").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
CALLBACKS = {"decentral.integrations.transformers": transformers, "decentral.integrations.lightning": lightning}


def snippets() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)):
            yield f"{page.relative_to(ROOT)} {number}", block
    for script in SCRIPTS:
        yield str(script.relative_to(ROOT)), script.read_text(encoding="utf-8")
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        yield (
            str(notebook.relative_to(ROOT)),
            "\n".join(re.sub(r"^[!%].*", "", one, flags=re.MULTILINE) for one in code),
        )


def names_of(code: str) -> set[tuple[str, str]]:
    """Module and name of what it takes from decentral."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # a page leaves out what does not matter
        tree = ast.parse(
            "\n".join(re.findall(r"^(?:from decentral\S* import .*|import decentral.*)$", code, re.MULTILINE))
        )
    found = set[tuple[str, str]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "decentral":
            found |= {(str(node.module), alias.name) for alias in node.names}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "decentral":
            found.add(("decentral", node.attr))
    return found


USED = sorted({(where, *pair) for where, code in snippets() for pair in names_of(code)})


def test_the_pages_and_the_examples_are_read() -> None:
    assert len({where for where, _, _ in USED}) > 10
    assert {("decentral", "join"), ("decentral", "apply_delta"), ("decentral.coding", "Floats")} <= {
        u[1:] for u in USED
    }


def test_what_a_snippet_takes_is_public_and_on_the_reference_page() -> None:
    page = names.page()
    shown = {
        "decentral": decentral.__all__,
        **{module: ["DecentralCallback"] for module in CALLBACKS},
        **names.OF_METHODS,
    }
    for where, module, name in USED:
        assert name in shown[module], where
        if module == "decentral":
            listed = name in errors.__all__ or re.search(rf"^::: decentral\.[\w.]*\b{name}$", page, re.MULTILINE)
            assert listed, f"{where}: {name}"
        else:
            assert f"\n::: {module}.{name}\n" in page, where


def test_what_a_sentence_of_the_pages_calls_is_public() -> None:
    called = {name for page in PAGES for name in re.findall(r"`decentral\.([a-z_]\w*)\(", page.read_text("utf-8"))}
    assert "tune" in called
    assert called <= set(decentral.__all__)


def test_what_is_shown_for_own_methods_is_public_in_its_module() -> None:
    for module, shown in names.OF_METHODS.items():
        assert set(shown) <= set(importlib.import_module(module).__all__)


# ---- types ----


def called() -> Iterator[tuple[str, FunctionType]]:
    """Every public function, and every public method that is written in this package."""
    for name in decentral.__all__:
        value = getattr(decentral, name)
        if isinstance(value, FunctionType):
            yield name, inspect.unwrap(value)
        elif inspect.isclass(value):
            yield from methods(name, value)
    for callback in CALLBACKS.values():
        yield from methods(f"{callback.__name__.split('.')[-1]}.DecentralCallback", callback.DecentralCallback)


def methods(owner: str, kind: type) -> Iterator[tuple[str, FunctionType]]:
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("decentral.") else ():
            for one in (value.fget,) if isinstance(value, property) else (getattr(value, "__func__", value),):
                written = isinstance(one, FunctionType) and one.__code__.co_filename != "<string>"  # no dataclass's own
                if (
                    written
                    and one.__module__.startswith("decentral.")  # and not typing's, nor pydantic's
                    and (not name.startswith("_") or name in ("__init__", "__iter__"))
                ):
                    yield f"{owner}.{name}", inspect.unwrap(one)


# Why is written beside each. `state_dict` is as torch has it; `own_keys` and the tables are of TOML's values.
ANY = {"RunSchedule.state_dict", "RunSchedule.load_state_dict", "Manifest.own_keys"}
# What a framework writes down, as it has it.
ANY |= {f"transformers.DecentralCallback.{name}" for name in ("state", "from_state")}
ANY |= {f"lightning.DecentralCallback.{name}" for name in ("state_dict", "load_state_dict", "on_save_checkpoint")}


def test_what_people_call_says_what_it_takes() -> None:
    for name, function in sorted(called(), key=lambda one: one[0]):
        typed = (*function.__annotations__, "self", "cls")
        assert [one for one in inspect.signature(function).parameters if one not in typed] == [], name
        for argument, annotation in function.__annotations__.items():
            assert name in ANY or not loose(annotation, function), f"{name}: {argument}: {annotation}"


def loose(annotation: object, function: FunctionType) -> bool:
    """Whether Any is in it, or in an alias that it names."""
    text = str(annotation)
    if re.search(r"\bAny\b", text):
        return True
    aliases = (function.__globals__.get(word) for word in re.findall(r"\b[A-Z]\w+\b", text))
    return any(not inspect.isclass(one) and "typing.Any" in repr(one) for one in aliases)


def test_every_argument_of_join_is_in_its_docstring_and_the_accelerator_first() -> None:
    parameters = list(inspect.signature(decentral.join).parameters.values())
    told = re.findall(r"^ {8}(\w+): ", decentral.join.__doc__ or "", re.MULTILINE)
    assert sorted(told) == sorted(one.name for one in parameters)
    keywords = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    assert keywords[0] == "accelerator"
    assert told[:4] == ["run", "model", "optimizer", "accelerator"]


NO_OTHERS = "follow_imports = skip\n[mypy-decentral]\nfollow_imports = silent\n"  # torch takes half a minute


def mypy(folder: Path, script: str, settings: str) -> str:
    (folder / "script.py").write_text(script, encoding="utf-8")
    (folder / "mypy.ini").write_text(f"[mypy]\nstrict = true\n{settings}", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "script.py"]
    done = subprocess.run(
        command, cwd=folder, env={"MYPYPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_a_misspelt_name_is_an_error_of_mypy_in_a_users_script(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    said = mypy(tmp_path, "import decentral\n\ndecentral.jion\ndecentral.join\ndecentral.Manifest\n", NO_OTHERS)
    assert re.findall(r"script.py:(\d+): error", said) == ["3"], said
    assert '"jion"' in said


LOOP = """
import torch
from torch.utils.data import IterableDataset, Sampler, TensorDataset

import decentral

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
terms = decentral.preset_manifest("diloco", rounds=3, swarm={"lease": 20.0})
with decentral.join(terms, model, optimizer, scheduler=[schedule]) as peer:
    sampler: Sampler[int] = peer.shard(TensorDataset(torch.zeros(3)), batch_size=1)
    stream: IterableDataset[str] = peer.shard(line for line in ("a", "b"))
    again: IterableDataset[str] = peer.shard(stream)
    rate: list[float | torch.Tensor] = peer.schedule(optimizer, lambda progress: 1 - progress).get_last_lr()

    @peer.on_round
    def told(ended: decentral.RoundEnded) -> None:
        print(ended.round, peer.status().round)

    model.load_state_dict(peer.agreed())
decentral.join(terms, model, optimizer, accelerator=3)  # wrong
decentral.preset_manifest("diloco", rounds="3")  # wrong
peer.on_round(lambda: None)  # wrong
"""


@pytest.mark.long
def test_a_users_loop_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    said = mypy(tmp_path, LOOP, "follow_imports = silent\nignore_missing_imports = true\n")
    wrong = [str(number) for number, line in enumerate(LOOP.splitlines(), 1) if line.endswith("# wrong")]
    assert re.findall(r"script.py:(\d+): error", said) == wrong, said


def test_a_name_that_is_not_there_is_an_attribute_error_at_run_time() -> None:
    with pytest.raises(AttributeError, match="jion"):
        getattr(decentral, "jion")  # noqa: B009
