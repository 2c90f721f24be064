"""A script's torch.set_default_dtype and set_default_device reach nothing here: each tensor is made with both."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.house import BESIDE

PACKAGE = Path(__file__).parents[2] / "decentral"
MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
NO_SCRIPTS = ("cli", *BESIDE)  # folders, whose processes are no script's


def makers_without(source: str) -> Iterator[str]:
    """Calls that leave dtype or device to what torch has for the default."""
    for one in ast.walk(ast.parse(source)):
        if not (isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in MAKERS):
            continue
        named = {keyword.arg for keyword in one.keywords}  # None: of **
        if ast.unparse(one.func.value) == "torch" and not ({"dtype", "device"} <= named or named & {"out", None}):
            yield f"{one.lineno}: {ast.unparse(one)}"


def test_every_tensor_is_made_with_its_dtype_and_its_device():
    names = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    read = {name for name in names if name.partition("/")[0] not in NO_SCRIPTS}
    assert len(read) > 200
    found = [f"{name}:{call}" for name in sorted(read) for call in makers_without((PACKAGE / name).read_text())]
    assert not found


def test_a_call_without_one_of_them_is_found():
    assert list(makers_without("torch.zeros(2)\ntorch.ones(2, dtype=d)\ntorch.full((), 1, dtype=d, device=e)")) == [
        "1: torch.zeros(2)",
        "2: torch.ones(2, dtype=d)",
    ]
