"""Optimizers that keep the weights themselves: float32 copies beside bfloat16, copies on the processor, slow weights.

Their step writes what they keep over the parameters, and with it over what a commit has written there. Copies that can
be seen move as the parameters do; what cannot be seen shows in the first steps after commits, and is refused.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from decentral.errors import ConfigError

Pairs = list[tuple[Tensor, Tensor]]  # a parameter, and what is kept of it

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
    """The copies in all optimizers of a loop, and in what is around them."""

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
    def moved(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Have what is written to ``parameters`` inside reach the copies of them, too."""
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

    def beside(self, held: Any, values: list[Any]) -> Iterator[tuple[int, list[Any]]]:
        """Numbers of rows, each with what a list or mapping may have of its parameters."""
        by_key = {id(key): value for key, value in held.items()} if isinstance(held, Mapping) else {}
        if not self._ids.isdisjoint(by_key):
            for number, row in enumerate(self.all):
                if all(id(one) in by_key for one in row):
                    yield number, [by_key[id(one)] for one in row]
        elif values and isinstance(values[0], Tensor) and id(values[0]) not in self._ids:
            yield from ((number, values) for number in self._as_long.get(len(values), ()))


def _families(optimizer: Any, way: str, known: Container[str]) -> Iterator[tuple[str, Pairs]]:
    """Everything in an optimizer that goes with its parameters one by one, with the way to it."""
    yield from _inside(optimizer, way, _Rows(optimizer), known, set(), 0)


def _inside(
    held: Any, way: str, rows: _Rows, known: Container[str], seen: set[int], depth: int
) -> Iterator[tuple[str, Pairs]]:
    """Lists and mappings as long as a row of parameters, and alike in shapes."""
    if id(held) in seen or depth > MOST_DEPTH or not (hasattr(held, "param_groups") or isinstance(held, _KEEPS)):
        return
    seen.add(id(held))
    if hasattr(held, "param_groups"):
        yield from _of_state(getattr(held, "state", {}), f"{way}.state", rows.every, known)
        held = {key: value for key, value in vars(held).items() if key not in ("state", "defaults")}
    values = list(held.values()) if isinstance(held, Mapping) else list(held)
    for number, kept in rows.beside(held, values):
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
class Watched:
    """A parameter of an optimizer. Values are compared where they are, and asked for once a commit."""

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
        """A copy of some."""
        flat = self.parameter.detach().reshape(-1)
        return flat[:: max(1, flat.numel() // SAMPLE)].to(torch.float32, copy=True)

    def begins(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A step begins. One that makes its gradients inside is not looked at."""
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

    def ends(self, *_: object) -> None:
        """ConfigError once the optimizer is seen to undo what commits write."""
        if self.over:
            return
        now, before = self.values(), self.last
        if self.put is None:
            self.usual = None if before is None else (now - before).norm()
        else:
            self._judge(now)
        self.last, self.left, self.put, self.tests = now, None, None, False

    def written(self, before: Tensor) -> None:
        """Something was written; ``before``: the values before that."""
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


class Watch:
    """Looks at the longest parameter of each optimizer of a loop that is no average's."""

    def __init__(self, optimizers: Iterable[Any], trained: Mapping[str, Tensor], copies: Copies) -> None:
        """``trained``: the model's parameters by name, each whole in this process."""
        names = {id(parameter): name for name, parameter in trained.items()}
        self._watched, self._copies, self._looks = list[Watched](), copies, 0
        for optimizer in optimizers:
            held = [one for group in optimizer.param_groups for one in group["params"] if id(one) in names]
            if held:
                longest = max(held, key=Tensor.numel)
                self._watched.append(Watched(optimizer, longest, names[id(longest)]))

    @property
    def over(self) -> bool:
        """True when no write has to be seen any more."""
        return all(one.over for one in self._watched)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Look around every step. To be hooked before what writes at its end."""
        with ExitStack() as stack:
            for one in self._watched:
                stack.callback(one.optimizer.register_step_pre_hook(one.begins).remove)
                stack.callback(one.optimizer.register_step_post_hook(one.ends).remove)
                stack.callback(one.optimizer.register_step_post_hook(self._look).remove)
            yield

    def _look(self, optimizer: Any, *_: object) -> None:
        """Slow weights are what the parameters are after some steps alone, and commits need not follow those."""
        if self._looks < LOOKS * len(self._watched):
            self._looks += 1
            self._copies.look(optimizer)

    @contextmanager
    def writing(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """``parameters`` are written to inside."""
        ids = {id(one) for one in parameters}
        moved = [(one, one.values()) for one in self._watched if id(one.parameter) in ids and not one.over]
        yield
        for one, before in moved:
            one.written(before)
