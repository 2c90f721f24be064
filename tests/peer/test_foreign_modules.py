"""Models, optimizers and gradients as other packages make them: they take part as they are, or are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_map

import decentral
from decentral.errors import ConfigError
from decentral.manifest import Manifest, preset_manifest
from decentral.manifest.terms import Inner
from decentral.parameters import frozen_digest, schema_of
from decentral.state.checkpoint import keep_frozen, read_frozen
from decentral.state.export import export
from decentral.training.inner import differences, read_inner_settings
from decentral.training.live_model import LiveModel
from decentral.training.live_side import Moments
from tests.kit.problems import Swarm, joined
from tests.kit.switches import OF_A_THREAD, SWITCHES
from tests.kit.tables import long_but

Build = Callable[[int], tuple[nn.Module, Any]]


def terms(preset: str = "diloco", **tables: Any) -> Manifest:
    patient = {"deadline_floor": 5.0, "deadline_ceiling": 20.0}
    given = {"run": {"rounds": 3, "salt": "foreign"}, "model": {"task": "custom"}, "inner": {"steps": 3, "clip": None}}
    return preset_manifest(preset, swarm=patient, **(given | tables))


def stepped(model: nn.Module, optimizer: Any, number: int) -> None:
    sum(
        p.float().square().sum() + (number + 1) * p.float().sum() for p in model.parameters() if p.requires_grad
    ).backward()
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        one.step()
        one.zero_grad()


@dataclass
class Loop:
    """A model and an optimizer of somebody else's, and how they are stepped."""

    model: nn.Module
    optimizer: Any
    number: int = 0
    stepped: Callable[[nn.Module, Any, int], None] = stepped

    def step(self) -> float:
        self.stepped(self.model, self.optimizer, self.number)
        return 0.0


class Two(Swarm):
    """Two peers of what ``build`` makes; each thread is in ``within``."""

    def __init__(self, build: Build, folder: Path, manifest: Manifest | None = None, step: Any = stepped) -> None:
        super().__init__(manifest or terms(), folder, *(Loop(*build(number), number, step) for number in range(2)))
        self.within: Callable[[], AbstractContextManager[object]] = nullcontext

    def peer(self, number: int, **given: Any) -> None:
        with self.within():
            super().peer(number, **given)


# ---- modules ----


class Int8(Tensor):
    """A quantised weight that torch can take apart, as torchao's."""

    def __new__(cls, codes: Tensor, scale: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inside: dict[str, Tensor], context: None, size: Any, stride: Any) -> Int8:
        return Int8(inside["codes"], inside["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scale)
        plain = tree_map(lambda one: one.codes.float() * one.scale if isinstance(one, cls) else one, args)
        return func(*plain, **(kwargs or {}))


class Packed(Tensor):
    """One that nobody can read."""

    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(torch.zeros(args[0].shape), torch.ones(()))
        raise NotImplementedError(f"{func} of a packed weight")


def quantised(kind: Callable[[Tensor, Tensor], Tensor] = Int8) -> nn.Parameter:
    return nn.Parameter(kind(torch.arange(-8, 8, dtype=torch.int8).view(4, 4), torch.tensor(0.5)), requires_grad=False)


class Kinds(nn.Module):
    """Every kind of parameter once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scalar, self.none = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.empty(0, 4))
        self.crossed = nn.Parameter(torch.randn(6, 4).t())
        self.mixed = nn.ParameterList([torch.randn(3).to(dtype) for dtype in (torch.float16, torch.bfloat16)])
        self.wide = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
        self.tied, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.tied.weight
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.turned = parametrizations.orthogonal(nn.Linear(4, 4))
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.module = nn.Linear(4, 1)  # a word that a wrapper uses, too
        self.eight = nn.Parameter(torch.randn(4).to(torch.float8_e4m3fn), requires_grad=False)
        self.base = quantised()


def test_every_kind_of_parameter_takes_part_and_what_is_frozen_is_kept_in_its_parts(tmp_path: Path):
    def build(number: int) -> tuple[nn.Module, Any]:
        model: nn.Module = Kinds()
        if number:  # on two GPUs, say
            model.inside = nn.DataParallel(model.inside)
            model = nn.DataParallel(model)
        return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)

    swarm = Two(build, tmp_path).ends_alike()
    models = [LiveModel(loop.model, 1, None) for loop in swarm.problems]
    first, second = ({name: p.detach() for name, p in model.trained.items()} for model in models)
    assert list(first) == list(second)
    assert not any("module." in name for name in first if name not in ("module.weight", "module.bias"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    export(tmp_path / "peer0" / "checkpoints", tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert stored["base.codes"].dtype == torch.int8
    assert stored["eight"].dtype == torch.float8_e4m3fn


def test_another_quantised_base_is_told_from_this_one():
    one, other = Kinds(), Kinds()
    with torch.no_grad():
        other.base.scale.mul_(2)
    (difference,) = schema_of(one).describe_difference(schema_of(other))
    assert difference == "base.scale: frozen, other values here than in the run: the base model differs"


def test_a_dtype_that_no_file_has_a_word_for_is_kept_as_its_bytes(tmp_path: Path):
    model = nn.ParameterDict({"base": nn.Parameter(torch.ones(4).to(torch.float8_e8m0fnu), requires_grad=False)})
    model["trained"] = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([model["trained"]], lr=0.1)
    live = LiveModel(model, 1, None, [optimizer])
    keep_frozen(tmp_path, live.schema.frozen, live.frozen_parts, whole=live.whole_frozen)
    assert frozen_digest(read_frozen(tmp_path, live.schema.frozen)["base"]) == live.schema.frozen[0].digest


def unread() -> nn.Module:
    model = nn.Linear(4, 4)
    model.base = quantised(Packed)
    return model


def taken_apart() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight.ds_shape = (4, 4)  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)), r"0\.weight has no shape yet.*run one batch"),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d(affine=False)), r"1\.running_mean has no shape yet"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            r"1\.weight is on the meta device.*load the weights",
        ),
        (unread, r"base is frozen, and its bytes cannot be read \(.*Packed of float32: .*hold it in a plain tensor"),
        (taken_apart, r"weight is taken apart by DeepSpeed"),
    ],
    ids=["lazy", "lazy buffer", "on meta", "unread", "taken apart"],
)
def test_a_module_without_values_is_refused_by_name_before_anything_is_begun(
    tmp_path: Path, make: Callable[[], nn.Module], sentence: str
):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=sentence):
        joined(terms(), Loop(model, optimizer), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_module_that_is_called_module_keeps_its_name():
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "net": nn.DataParallel(nn.Linear(2, 2))})
    assert [spec.name for spec in schema_of(model).fragments[0].parameters] == [
        "module.weight", "module.bias", "net.weight", "net.bias",
    ]  # fmt: skip


def test_a_parametrized_weight_is_what_its_originals_were_written_to():
    layer = parametrizations.weight_norm(nn.Linear(3, 3))
    live = LiveModel(layer, 1, None)
    before = layer.weight.detach().clone()
    live.write(0, 2 * live.read(0))
    assert parametrize.is_parametrized(layer)
    torch.testing.assert_close(layer.weight.detach(), 2 * before)


# ---- gradients ----


def sparse(number: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = nn.ModuleDict({"table": nn.Embedding(20, 4, sparse=True), "head": nn.Linear(4, 1)})
    rows = torch.optim.SparseAdam(model["table"].parameters(), 1e-2)
    return model, [rows, torch.optim.AdamW(model["head"].parameters(), 1e-2)]


def looked_up(model: Any, optimizers: Any, number: int) -> None:
    row = torch.arange(number, 20, 3)
    (model["head"](model["table"](row)) - row[:, None] / 20).square().mean().backward()
    for one in optimizers:
        one.step()
        one.zero_grad()


@pytest.mark.parametrize("preset", long_but(["sparseloco", "des_loc"], ["diloco", "sparseloco", "des_loc", "noloco"]))
def test_sparse_embeddings_train_with_methods_that_look_at_parameters_and_moments(tmp_path: Path, preset: str):
    Two(sparse, tmp_path, terms(preset), looked_up).ends_alike()


def test_an_embedding_with_sparse_gradients_is_named_where_a_method_changes_all_of_them(tmp_path: Path):
    model, optimizers = sparse(0)
    with pytest.raises(ConfigError, match=r"the gradient of table\.weight is sparse.*sparse=False.*another method"):
        joined(terms("scaffold"), Loop(model, optimizers), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_sparse_otherwise_is_named_when_it_is_changed():
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moments = Moments(LiveModel(model, 1, None, [optimizer]), [optimizer])
    model.weight.grad = torch.eye(3).to_sparse()
    assert torch.equal(moments.read_gradient(0), torch.eye(3).flatten())
    with pytest.raises(ConfigError, match=r"the gradient of weight is sparse"):
        moments.add_to_gradient(0, torch.ones(9))


# ---- torch's switches ----


@pytest.mark.parametrize("switch", long_but(("bfloat16", "another device", "inference"), tuple(SWITCHES)))
def test_a_script_that_has_thrown_a_switch_of_torchs_takes_part(tmp_path: Path, switch: str):
    """Its own model is as it made it; scaffold makes the most on the training thread."""

    def build(number: int) -> tuple[nn.Module, Any]:
        with torch.inference_mode(mode=False):
            model = nn.Sequential(nn.Linear(4, 4, device="cpu"), nn.BatchNorm1d(4, device="cpu"))
            return model, torch.optim.AdamW(model.parameters(), 1e-2)

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        with torch.inference_mode(mode=False), torch.enable_grad():
            model(torch.ones(3, 4, device="cpu", dtype=model[0].weight.dtype) * (number + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with SWITCHES[switch]():
        two = Two(build, tmp_path, terms("scaffold"), step)
        two.within = SWITCHES[switch] if switch in OF_A_THREAD else nullcontext
        two.ends_alike()


# ---- parameter groups ----


class Group:
    """What ``differences`` reads of an optimizer."""

    def __init__(self, *groups: dict[str, Any]) -> None:
        self.param_groups = list(groups)


NOT_NUMBERS: list[dict[str, Any]] = [
    {"lr": None, "weight_decay": None, "betas": None},
    {"lr": lambda step: 1e-3},
    {"lr": torch.tensor([1.0, 2.0]), "betas": (None, None)},
    {"lr": "auto", "betas": torch.tensor(0.9)},
    {},
]


def test_numbers_are_compared_in_a_tensor_too_and_what_is_no_number_is_not():
    def compared(group: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        inner, held = Inner(learning_rate=0.1, weight_decay=0.0, beta1=0.9, beta2=0.95), [Group(group)]
        return {key: there for key, _, there in differences(inner, held)}, read_inner_settings(held)  # type: ignore[arg-type]

    for group in NOT_NUMBERS:
        told, read = compared(group)
        assert told.keys() == {"optimizer"}, group
        assert "learning_rate" not in read, group
    told, _ = compared({"lr": torch.tensor(0.1, dtype=torch.float64)})
    assert "learning_rate" not in told
    told, read = compared({"lr": torch.tensor([0.2])})
    assert told["learning_rate"] == "0.2"
    assert read["learning_rate"] == pytest.approx(0.2)


def test_adafactor_that_finds_its_rate_founds_and_trains(tmp_path: Path):
    transformers = pytest.importorskip("transformers")

    def build(number: int) -> tuple[nn.Module, Any]:
        model = nn.Linear(4, 2)
        return model, transformers.Adafactor(model.parameters(), lr=None, relative_step=True, warmup_init=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own, of torch's deprecated overloads
        Two(build, tmp_path).ends_alike()
    model, optimizer = build(0)
    decentral.join(model=model, optimizer=optimizer, preset="diloco", rounds=3, steps=2, out=tmp_path / "x")


# ---- processes ----


@pytest.mark.parametrize("knows_itself", [False, True], ids=["no accelerator", "one alone"])
def test_one_of_several_processes_that_knows_of_no_other_is_told_how_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_itself: bool
):
    whole = {"unwrap_model": lambda model: model}
    accelerator = SimpleNamespace(num_processes=1, is_main_process=True, device=torch.device("cpu"), **whole)
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(2, 2)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2.*ACCELERATE_USE_CPU=true before the command.*one peer"):
        joined(terms(), loop, tmp_path / "run", accelerator=accelerator if knows_itself else None)
    assert not (tmp_path / "run").exists()
