"""Optimizers that keep weights themselves: averages, float32 copies beside bfloat16, copies elsewhere, slow weights.

An optimizer that learns an average shows it to rounds. One with copies writes them over the parameters in its step, and
so over a commit's: copies that can be seen move as the parameters do; others show in the first steps after commits, and
are refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from decentral.errors import ConfigError

Pairs = list[tuple[Tensor, Tensor]]  # a parameter, and its copy

# ---- the averages that rounds see ----
#
# An optimizer that trains at other parameters than it learns shows a round what it learns: the average, x.
#
# Schedule-Free and GPA keep y in the parameters, where gradients are taken, and swap it for x in ``eval()``. Peers
# agree on x: it is what is contributed, what the anchor is a mean of, and what is evaluated and checkpointed. A commit
# that moves x moves z, and with them y, by as much: each peer goes on as far ahead of its x as it was. Were z left
# behind, peers would never average what their steps are made on, and x would run back to it.

Z_MINUS_X = "z_minus_x"  # what stands for z in an optimizer's state while the parameters hold x and may be moved


class Averages:
    """Optimizers that swap x for y and back: any with ``train``, ``eval``, ``train_mode`` and ``z``, as ours have."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._swapping: list[Any] = [one for one in optimizers if _swaps(one)]  # Any: such methods have no base
        self._trained: list[bool] | None = None  # modes to go back to, while the parameters hold x

    @property
    def shown(self) -> bool:
        """True while the parameters hold x, to be read and moved."""
        return self._trained is not None

    def swaps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer does."""
        return any(one is optimizer for one in self._swapping)

    @torch.no_grad()
    def show(self) -> None:
        """Let the parameters hold x, to be read and moved, until ``resume``. Nothing is done twice."""
        if self._trained is not None:
            return
        self._trained = [_trains(optimizer) for optimizer in self._swapping]
        for optimizer in self._swapping:
            optimizer.eval()
            for parameter, state in optimizer.state.items():
                if "z" in state:
                    state[Z_MINUS_X] = state.pop("z").sub_(parameter)

    @torch.no_grad()
    def resume(self, *, to_train: bool = True) -> None:
        """Go on with y of wherever x is now; x stays unless ``to_train``, or where the loop was evaluating."""
        if self._trained is None:
            return
        for optimizer, trained in zip(self._swapping, self._trained, strict=True):
            for parameter, state in optimizer.state.items():
                if Z_MINUS_X in state:
                    state["z"] = state.pop(Z_MINUS_X).add_(parameter)
            if to_train and trained:
                optimizer.train()
        self._trained = None

    def stay(self) -> None:
        """Let the parameters hold x for good: after the run they are what was contributed."""
        self.show()
        self.resume(to_train=False)


def _swaps(optimizer: torch.optim.Optimizer) -> bool:
    methods = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
    return methods and all("train_mode" in group for group in optimizer.param_groups)


def _trains(optimizer: torch.optim.Optimizer) -> bool:
    return any(group["train_mode"] for group in optimizer.param_groups)


# ---- copies that can be seen ----
#
# Lists beside the parameters of a group, mappings by parameter, and what ``state`` has of every parameter under one
# name, at any depth inside an optimizer. A family of such tensors is of copies once all of them are what the parameters
# are, rounded as those are: a momentum never is, for it is not looked at while all are zero.
#
# A copy that was one stays one: slow weights are behind the parameters between two of their steps, and move by as much.

MOST_DEPTH = 5
_KEEPS = (Mapping, list, tuple)
_HOLDS_NOTHING = (Tensor, float, int, str, type(None))
# of DeepSpeed, of Megatron: to be called when somebody else has changed the parameters
RELOADS = ("refresh_fp32_params", "reload_model_params")


class Copies:
    """Copies of weights in all optimizers of a loop, and in wrappers around them."""

    def __init__(self, optimizers: Sequence[Any] = ()) -> None:
        self._optimizers = [one for one in optimizers if hasattr(one, "param_groups")]
        self._numbers = {id(one): number for number, one in enumerate(self._optimizers)}
        self._known: set[str] = set()  # families, by their way from an optimizer
        found = (getattr(one, name, None) for one in optimizers for name in RELOADS)
        self._reloads = [one for one in found if callable(one)]

    @property
    def any(self) -> bool:
        """True where something has to be done beside a write."""
        return bool(self._known or self._reloads)

    @torch.no_grad()
    def look(self, only: Any = None) -> None:
        """Find families that are copies just now, of all optimizers or of one."""
        for way, family in self._families(only):
            if way not in self._known and _are_copies(family):
                self._known.add(way)

    @contextmanager
    def following(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Have copies follow their ``parameters`` through what is written to those inside."""
        self.look()
        wanted = {id(one) for one in parameters}
        known = [family for way, family in self._families() if way in self._known] if self._known else []
        kept = [pair for family in known for pair in family if id(pair[0]) in wanted]
        # SAM puts what it kept in the parameter's place: the write itself reaches that.
        pairs = {id(copy): (one, copy) for one, copy in kept if copy.data_ptr() != one.data_ptr()}
        before = {id(one): one.detach().clone() for one, _ in pairs.values()}
        yield
        for parameter, copy in pairs.values():
            _move(copy, before[id(parameter)], parameter)
        for reload in self._reloads:
            reload()

    def _families(self, only: Any = None) -> Iterator[tuple[str, Pairs]]:
        for one in self._optimizers if only is None else [only]:
            if (number := self._numbers.get(id(one))) is not None:
                yield from _families(one, str(number), self._known)


@torch.no_grad()
def _move(copy: Tensor, before: Tensor, parameter: Tensor) -> None:
    """Put values that are the parameter's to it, to the bit; have those elsewhere go as far."""
    old, new = before.to(copy.device), parameter.detach().to(copy.device)
    by = copy + (new.to(copy.dtype) - old.to(copy.dtype))
    copy.copy_(torch.where(copy.to(old.dtype) == old, new.to(copy.dtype), by))


def _are_copies(family: Pairs) -> bool:
    """Tell whether all are what their parameters are, and one is not zero. A few values of that one say no at once."""
    told = next((pair for pair in family if bool(_few(pair[0]).any())), None)
    if told is None or not _is_copy(_few(told[0]), _few(told[1])):
        return False
    return all(_is_copy(one, copy) for one, copy in family)


def _few(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:8]


def _is_copy(parameter: Tensor, copy: Tensor) -> bool:
    return torch.equal(copy.detach().to(parameter.device, parameter.dtype), parameter.detach())


class _Rows:
    """The parameters of each group, and those of all: what a list of copies is as long as. Where each parameter has a
    group of its own there are as many as lists, which are not all compared with all.
    """

    def __init__(self, optimizer: Any) -> None:
        groups = [list(group["params"]) for group in optimizer.param_groups]
        self.every = [parameter for group in groups for parameter in group]
        self.all = list({tuple(map(id, row)): row for row in (*groups, self.every) if row}.values())
        self._ids = frozenset(map(id, self.every))
        self._as_long: dict[int, list[int]] = {}
        for number, row in enumerate(self.all):
            self._as_long.setdefault(len(row), []).append(number)

    def match(self, held: Any, values: list[Any]) -> Iterator[tuple[int, list[Any]]]:
        """Find the rows of which a list or mapping may have copies: their numbers, and the copies."""
        by_key = {id(key): value for key, value in held.items()} if isinstance(held, Mapping) else {}
        if not self._ids.isdisjoint(by_key):
            for number, row in enumerate(self.all):
                if all(id(one) in by_key for one in row):
                    yield number, [by_key[id(one)] for one in row]
        elif values and isinstance(values[0], Tensor) and id(values[0]) not in self._ids:
            yield from ((number, values) for number in self._as_long.get(len(values), ()))


def _families(optimizer: Any, way: str, known: Container[str]) -> Iterator[tuple[str, Pairs]]:
    """Find everything in an optimizer that goes with its parameters one by one, and the way to it."""
    yield from _inside(optimizer, way, _Rows(optimizer), known, set(), 0)


def _inside(
    held: Any, way: str, rows: _Rows, known: Container[str], seen: set[int], depth: int
) -> Iterator[tuple[str, Pairs]]:
    """Find lists and mappings as long as a row of parameters, and alike in shapes."""
    if id(held) in seen or depth > MOST_DEPTH or not (hasattr(held, "param_groups") or isinstance(held, _KEEPS)):
        return
    seen.add(id(held))
    if hasattr(held, "param_groups"):
        yield from _of_state(getattr(held, "state", {}), f"{way}.state", rows.every, known)
        held = {key: value for key, value in vars(held).items() if key not in ("state", "defaults")}
    values = list(held.values()) if isinstance(held, Mapping) else list(held)
    for number, kept in rows.match(held, values):
        if _fits(rows.all[number], kept):
            yield f"{way}[{number}]", list(zip(rows.all[number], kept, strict=True))
    names = list(held) if isinstance(held, Mapping) else range(len(values))
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, _HOLDS_NOTHING):
            yield from _inside(
                value, f"{way}.{name if isinstance(name, str | int) else 'of'}", rows, known, seen, depth + 1
            )


def _of_state(state: Any, way: str, parameters: list[Tensor], known: Container[str]) -> Iterator[tuple[str, Pairs]]:
    """Find what each parameter has under one name; not where one that is not zero shows that it is no copy."""
    if not state:
        return
    stepped = (one for one in parameters if isinstance(state.get(one), Mapping) and bool(_few(one).any()))
    if (told := next(stepped, None)) is None:
        return
    for name, copy in dict(state[told]).items():
        if f"{way}.{name}" in known or (_fits([told], [copy]) and _is_copy(_few(told), _few(copy))):
            row = [one for one in parameters if state.get(one)]
            kept = [state[one].get(name) for one in row]
            if _fits(row, kept):
                yield f"{way}.{name}", list(zip(row, kept, strict=True))


def _fits(row: Sequence[Tensor], kept: Sequence[Any]) -> bool:
    return len(row) == len(kept) and all(
        isinstance(copy, Tensor) and copy is not one and copy.shape == one.shape and copy.is_floating_point()
        for one, copy in zip(row, kept, strict=True)
    )


# ---- copies that cannot be seen ----
#
# Of one parameter of each optimizer a few values are read around steps. An optimizer that has copies elsewhere puts
# them back, in the first step after a commit, to where they were before it. So may an honest one that finds its way
# back in one step, on a quadratic say: the next time its gradient is zero for that one step, and only what goes by
# copies returns. That is done once in a run, of one parameter.
#
# Nothing is judged by a commit that moves less than a few usual steps do.

SAMPLE: Final = 1024  # values
FAR = 4.0  # usual steps that a commit must move the values by, to be judged
BACK = 0.5  # of the way: nearer to where they were is back
FINE = 2  # commits that stayed, after which nobody looks any more
MOST = 20  # commits that are looked at, in which none went far enough


@dataclass
class Probe:
    """A parameter of an optimizer, some of whose values are compared around steps and commits."""

    optimizer: Any
    parameter: Tensor
    name: str
    last: Tensor | None = None  # after the step before
    usual: Tensor | None = None  # length of a step
    left: Tensor | None = None  # where a commit took the values from
    put: Tensor | None = None  # and to
    suspected: bool = False  # they went back once
    tests: bool = False  # the step that is being made goes by no gradient
    fine: int = 0
    looked: int = 0

    @property
    def over(self) -> bool:
        """True when nothing more is to be found out."""
        return self.fine >= FINE or self.looked >= MOST

    def values(self) -> Tensor:
        """Copy some of its values."""
        flat = self.parameter.detach().reshape(-1)
        return flat[:: max(1, flat.numel() // SAMPLE)].to(torch.float32, copy=True)

    def before_step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Zero the gradient where that decides a suspicion. A step that makes its gradients inside is not looked at."""
        if any(given is not None for given in (*args[1:], *kwargs.values())):
            self.looked = MOST
        if self.over:
            return
        if self.put is not None and not torch.equal(
            self.values(), self.put
        ):  # the loop moved it, as one that clamps does
            self.left = self.put = None
        if self.put is not None and self.suspected and self._is_far and self.parameter.grad is not None:
            self.parameter.grad.zero_()
            self.tests = True

    def after_step(self) -> None:
        """Raise ConfigError once the optimizer is seen to undo what commits write."""
        if self.over:
            return
        now, before = self.values(), self.last
        if self.put is None:
            self.usual = None if before is None else (now - before).norm()
        else:
            self._judge(now)
        self.last, self.left, self.put, self.tests = now, None, None, False

    def after_write(self, before: Tensor) -> None:
        """Note a commit's values; ``before``: the values before it."""
        if not self.over:
            self.left, self.put = before if self.left is None else self.left, self.values()

    @property
    def _is_far(self) -> bool:
        if self.left is None or self.put is None or self.usual is None:
            return False
        way = float((self.put - self.left).norm())
        return way > 0 and way >= FAR * float(self.usual)

    def _judge(self, now: Tensor) -> None:
        self.looked += 1
        if not self._is_far:
            return
        assert self.left is not None
        assert self.put is not None
        went_back = float((now - self.left).norm()) <= BACK * float((self.put - self.left).norm())
        if went_back and self.tests:
            kind = type(self.optimizer).__name__
            raise ConfigError(
                f"what commits write does not stay: the next step of the {kind} puts {self.name} back to where it was, "
                "from a copy of the weights that it keeps, so that nothing is learnt of the others; use an optimizer "
                "that steps the parameters themselves, or keep its copies in optimizer.state, where they move along"
            )
        self.suspected, self.fine = went_back, FINE if self.tests else 0 if went_back else self.fine + 1


LOOKS: Final = 64  # steps after which it is seen whether copies are what the parameters are


class UndoGuard:
    """Refuses an optimizer whose steps undo what commits write; looks at the longest parameter of each."""

    def __init__(self, optimizers: Iterable[Any], trained: Mapping[str, Tensor], copies: Copies) -> None:
        """``trained``: the model's parameters by name, each whole in this process."""
        self._optimizers, self._copies, self._looks = list(optimizers), copies, 0
        self._probes = dict[int, Probe]()  # by the id of the optimizer
        self.look_at(trained)

    def look_at(self, trained: Mapping[str, Tensor]) -> None:
        """Look at these parameters from now on, and at no others."""
        names = {id(parameter): name for name, parameter in trained.items()}
        self._probes = {}
        for optimizer in self._optimizers:
            held = [one for group in optimizer.param_groups for one in group["params"] if id(one) in names]
            if held:
                longest = max(held, key=Tensor.numel)
                self._probes[id(optimizer)] = Probe(optimizer, longest, names[id(longest)])

    @property
    def over(self) -> bool:
        """True when no write has to be seen any more."""
        return all(one.over for one in self._probes.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look around every step inside. To be entered before what writes at the end of a step."""
        with ExitStack() as stack:
            for one in self._optimizers:
                stack.callback(one.register_step_pre_hook(partial(self._before_step, one)).remove)
                stack.callback(one.register_step_post_hook(partial(self._after_step, one)).remove)
            yield

    def _before_step(self, optimizer: Any, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if (probe := self._probes.get(id(optimizer))) is not None:
            probe.before_step(args, kwargs)

    def _after_step(self, optimizer: Any, *_: object) -> None:
        if (probe := self._probes.get(id(optimizer))) is not None:
            probe.after_step()
            self._look(optimizer)

    def _look(self, optimizer: Any) -> None:
        """Look for slow weights: they equal the parameters after some steps alone, and commits may miss those."""
        if self._looks < LOOKS * len(self._probes):
            self._looks += 1
            self._copies.look(optimizer)

    @contextmanager
    def writing(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Note what is written to ``parameters`` inside."""
        ids = {id(one) for one in parameters}
        probed = [(one, one.values()) for one in self._probes.values() if id(one.parameter) in ids and not one.over]
        yield
        for one, before in probed:
            one.after_write(before)
