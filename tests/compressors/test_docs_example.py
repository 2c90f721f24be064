"""The method that docs/compressors.md shows: executed, chained, sent through a frame's body, and fed with any bytes."""

import re
import sys
import types
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch

from decentral.compressors import Payload, parse_compressor, plugins
from decentral.compressors.feedback import ErrorFeedback
from decentral.errors import NonFiniteError, PayloadError
from decentral.exchange.codec import Codec

PAGE = Path(__file__).parents[2] / "docs/compressors.md"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as an installed package would be found."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(code.splitlines()) <= 40
    module = types.ModuleType("my_package")
    monkeypatch.setitem(sys.modules, "my_package", module)  # dataclass looks its module up
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    group = "decentral.compressors"
    found = EntryPoints([EntryPoint(name="ternary", value="my_package:Ternary", group=group)])
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: found.select(**wanted))


@pytest.mark.parametrize("spelling", ["ternary(cut=0.5)", "topk(k=64, chunk=4096) >> ternary(cut=0.3)"])
@pytest.mark.parametrize("shape", [(), (0,), (13,), (67, 131)])
def test_the_example_sends_tensors_like_any_other_method(
    installed: None, spelling: str, shape: tuple[int, ...]
) -> None:
    compressor = parse_compressor(spelling)
    assert str(compressor) == spelling
    codec = Codec(compressor, ErrorFeedback(0.95))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).flatten()
    encoded = codec.encode(tensor, {}, (shape,))
    found = codec.decode(encoded.body, (shape,))
    assert torch.allclose(found + encoded.feedback["debt"], tensor, atol=1e-6)
    assert len(encoded.body) <= codec.max_body_nbytes((shape,))


def test_the_example_refuses_what_it_should(installed: None) -> None:
    ternary = parse_compressor("ternary")
    for codes, scale in (([3, 0], 1.0), ([1, 2], float("nan"))):
        with pytest.raises(PayloadError):
            ternary.decompress(Payload((2,), (torch.tensor(codes, dtype=torch.uint8), torch.tensor([scale]))))
    with pytest.raises(NonFiniteError):
        ternary.compress(torch.tensor([1.0, float("inf")]))
    assert torch.isfinite(ternary.decompress(ternary.compress(torch.full((5,), 3.4e38)))).all()
