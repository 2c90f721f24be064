"""Two peers of one training loop, on threads; the loop is a function of a `Script`, as its repository writes it.

What a repository reads from a disk comes from `Script.randn` and its kin here; `Script.join` is `decentral.join` with
what a test fills in. All else is the loop's.
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import decentral
from decentral.manifest import Manifest, preset_manifest

ROUNDS, STEPS = 3, 4
LONG = 40.0  # s after which a loop that is not over is given up; one takes a second
NET = {"transport": "native", "lan": False, "commands": False, "quiet": True, "listen": ("/ip4/127.0.0.1/tcp/0",)}


@dataclass(frozen=True)
class Loop:
    """A row of the zoo: who writes such a loop, of what kind it is, and how it ends."""

    run: Callable[[Script], None]
    kind: str
    wrote: str
    refused: str  # words of the ConfigError; empty: it runs
    warned: str  # words of a warning, where the loop ends by itself before the run is over
    learns: bool  # the losses that it tells fall
    long: bool  # another one of its kind is tried by `make test`, too
    terms: dict[str, dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)  # of join


LOOPS: dict[str, Loop] = {}
AS_TOLD = "_as_told"  # how a loop is called that does what the error says


def loop(
    kind: str,
    wrote: str,
    *,
    name: str = "",
    refused: str = "",
    warned: str = "",
    as_told: dict[str, Any] | None = None,
    learns: bool = False,
    long: bool = False,
    **terms: dict[str, Any],
) -> Callable[[Callable[[Script], None]], Callable[[Script], None]]:
    """Put a loop into the table. ``terms``: tables of the manifest that are not the zoo's usual ones; ``name``: that of
    the row, where it is not the function's, which is in the table already.

    ``as_told``: options of join that the error names; with them it runs, which is a row of its own.
    """

    def put(run: Callable[[Script], None]) -> Callable[[Script], None]:
        row = name or run.__name__
        assert row not in LOOPS
        LOOPS[row] = Loop(run, kind, wrote, refused, warned, learns, long, terms)
        if as_told is not None:
            LOOPS[row + AS_TOLD] = Loop(run, kind, wrote, "", "", learns, long, terms, as_told)
        return run

    return put


def run_terms(**tables: dict[str, Any]) -> Manifest:
    """A short run; ``preset`` in ``outer`` is the method's."""
    outer = dict(tables.pop("outer", {}))
    return preset_manifest(
        outer.pop("preset", "diloco"),
        run={"name": "zoo", "rounds": ROUNDS, "salt": "zoo", **tables.pop("run", {})},
        model={"task": "custom", **tables.pop("model", {})},
        swarm={"deadline_floor": 10.0, "deadline_ceiling": 30.0, "lease": 30.0, **tables.pop("swarm", {})},
        inner={"steps": STEPS, **tables.pop("inner", {})},
        outer=outer,
        **tables,
    )


# ---- models and loops that many write ----


def stack(between: Callable[[], nn.Module], *sizes: int) -> nn.Sequential:
    """Linear layers of these sizes, and a module ``between`` each two."""
    layers: list[nn.Module] = []
    for of, to in pairwise(sizes):
        layers += [nn.Linear(of, to), between()]
    return nn.Sequential(*layers[:-1])


def mlp(*sizes: int) -> nn.Sequential:
    return stack(nn.ReLU, *sizes)


def regression(script: Script, model: nn.Module, optimizer: Any, **options: Any) -> None:
    """The plain loop, by how far the model is from the sum of what it is given."""

    def loss() -> Tensor:
        x = script.randn(32, 8)
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    script.train(model, optimizer, loss, **options)


@dataclass
class Script:
    """What one peer's script has beside its loop."""

    number: int
    run: Manifest | str
    out: Path
    options: dict[str, Any] = field(default_factory=dict)
    entered: Callable[[Script, decentral.Peer], None] = lambda script, peer: None
    losses: list[float] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    error: BaseException | None = None
    told: str = ""  # the error's traceback
    round: int = -1
    digest: str = ""
    before: dict[str, Tensor] = field(default_factory=dict)  # the model's state when it had entered
    after: dict[str, Tensor] = field(default_factory=dict)  # and when it was done
    trained: set[str] = field(default_factory=set)  # names of what gradients train
    began: bool = False
    strides: list[float] = field(default_factory=list)  # how far each step moved the model, but for those with a commit

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.number)
        self.until = time.monotonic() + LONG

    @contextmanager
    def join(self, model: nn.Module, optimizer: Any, **options: Any) -> Iterator[decentral.Peer]:
        """``decentral.join``; the block begins once both are there."""
        with decentral.join(
            self.run, model, optimizer, out=self.out, observer=self.events.append, **{**NET, **self.options, **options}
        ) as peer:
            self.entered(self, peer)
            self.before = _state(model)
            self.trained = {_plain(name) for name, p in model.named_parameters() if p.requires_grad}
            with _watched(model, optimizer, peer, self.strides):
                yield peer
            self.round, self.digest = peer.round, peer.anchor_digest
        self.after = _state(model)

    def train(
        self,
        model: nn.Module,
        optimizer: Any,
        loss_of: Callable[[], Tensor],
        *,
        begins: Callable[[int], object] = lambda step: None,
        ends: Callable[[int], object] = lambda step: None,
        **options: Any,
    ) -> None:
        """The plain loop, where what is peculiar to a script is its model, its optimizer or its loss, or what it does
        as a step begins or ends.
        """
        with self.join(model, optimizer, **options) as peer:
            for step in itertools.count():
                if peer.done:
                    break
                begins(step)
                loss = loss_of()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ends(step)
                self.losses.append(loss.item())

    def randn(self, *shape: int) -> Tensor:
        self._in_time()
        return torch.randn(*shape, generator=self.generator)

    def rand(self, *shape: int) -> Tensor:
        self._in_time()
        return torch.rand(*shape, generator=self.generator)

    def randint(self, below: int, *shape: int) -> Tensor:
        self._in_time()
        return torch.randint(below, shape, generator=self.generator)

    def _in_time(self) -> None:
        if time.monotonic() > self.until:
            raise TimeoutError(f"the loop is not over after {LONG:g} s: none of its steps counts, or a peer is missing")

    def live(self, loop: Loop) -> None:
        """All of the script's life, on its thread."""
        self.began = True
        torch.manual_seed(0)
        try:
            loop.run(self)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error, self.told = error, traceback.format_exc()


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {_plain(name): tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _plain(name: str) -> str:
    """As it is without DataParallel."""
    return name.removeprefix("module.")


@contextmanager
def _watched(model: nn.Module, optimizer: Any, peer: decentral.Peer, strides: list[float]) -> Iterator[None]:
    """Measure how far the loop moves the model from the end of a step to that of the next, rounds left out.

    Hooked after join, so that what a boundary writes is there at the end of a step.
    """
    last = (optimizer if isinstance(optimizer, list | tuple) else [optimizer])[-1]
    last = getattr(last, "optimizer", last)  # accelerate's wrapper is an Optimizer without hooks
    then = {"round": peer.round, "flat": _flat(model)}

    def ends(*_: object) -> None:
        now, flat = peer.round, _flat(model)
        if now == then["round"] and flat.shape == then["flat"].shape:
            strides.append(float((flat - then["flat"]).norm()))
        then.update(round=now, flat=flat)

    hook = last.register_step_post_hook(ends)
    try:
        yield
    finally:
        hook.remove()


def _flat(model: nn.Module) -> Tensor:
    found = [p.detach().reshape(-1).float().clone() for p in model.parameters() if p.requires_grad]
    return torch.cat(found) if found else torch.zeros(0)


@contextmanager
def _switches_put_back() -> Iterator[None]:
    """Whatever a script turns for all of the process."""
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    gradients = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic)
        torch.autograd.set_detect_anomaly(False)
        torch.set_grad_enabled(gradients)
        torch.set_default_device(None)


@dataclass
class Outcome:
    """What became of the two, and of the first one's restart."""

    scripts: list[Script]
    again: Script | None
    said: list[str]  # warnings

    @property
    def errors(self) -> list[BaseException]:
        return [script.error for script in self.scripts if script.error is not None]

    @property
    def refused(self) -> list[BaseException | None]:
        """What each of those that began was told; the second one does not begin where the first did not enter."""
        return [script.error for script in self.scripts if script.began]

    @property
    def told(self) -> str:
        return next((script.told for script in self.scripts if script.error is not None), "")

    def commits(self) -> list[dict[str, Any]]:
        return [event for event in self.scripts[0].events if event.get("event") == "commit"]


def trained_together(loop: Loop, folder: Path) -> Outcome:
    """Both peers until the run is over; then the first script once more, which finds its folder done."""
    founded, both = threading.Event(), threading.Event()
    founder = Script(0, run_terms(**loop.terms), folder / "first", loop.options)
    guest = Script(1, "", folder / "second", loop.options)

    def first_entered(script: Script, peer: decentral.Peer) -> None:
        guest.run = peer.invite
        founded.set()
        assert both.wait(LONG), "nobody came"

    def second_entered(script: Script, peer: decentral.Peer) -> None:
        peer.wait_for_company()
        both.set()

    founder.entered, guest.entered = first_entered, second_entered

    def follow() -> None:
        founded.wait(LONG)
        if founder.error is None:
            guest.live(loop)
        both.set()

    def found() -> None:
        founder.live(loop)
        founded.set()

    again = None
    with _switches_put_back(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=body, daemon=True) for body in (found, follow)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG + 30)
        assert not any(thread.is_alive() for thread in threads), "a peer hangs"
        if founder.error is None and guest.error is None:
            again = Script(0, founder.run, folder / "first", loop.options)
            again.live(loop)
    return Outcome([founder, guest], again, [str(one.message) for one in said])
