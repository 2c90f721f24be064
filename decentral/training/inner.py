"""Inner optimizers: a manifest's, built, warmed up and stepped; a loop's own, compared with it and followed."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from decentral.errors import ConfigError
from decentral.manifest.terms import INNER_OPTIMIZERS, OWN_KEYS, Inner, InnerName
from decentral.parameters.schema import local_part
from decentral.training.inner_optimizers import ADOPT, GPA, QHADOPT, SPSA, ScheduleFree, step_forward
from decentral.training.inner_states import HOOKS

# ---- building what a manifest names ----
#
# Muon is torch's, for the matrices inside, with AdamW beside it for embeddings, head and vectors. Its rate is scaled by
# 0.2 * sqrt(max(rows, columns)), so that its steps are as long as AdamW's and one ``learning_rate`` fits both; decay
# uses the rate as it is. No Nesterov, as in MuLoCo, which scales by sqrt(rows / columns) instead.
#
# Source of Muon: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; of the scale: Liu et
# al., "Muon is Scalable for LLM Training", 2025, arXiv:2502.16982.

Optimizers = list[torch.optim.Optimizer]
OwnValues = Mapping[str, float]


def build_inner(inner: Inner, model: nn.Module) -> Optimizers:
    """Make one optimizer, or two of which each has some of the parameters; a step of every one is an inner step."""
    held = list(model.parameters())
    if INNER_OPTIMIZERS[inner.optimizer_name].forward_only:
        return [forward_only(inner, [(name, p) for name, p in model.named_parameters() if p.requires_grad])]
    hidden = {id(parameter) for parameter in _matrices_inside(model)} if inner.optimizer_name == "muon" else set()
    return built(inner, [p for p in held if id(p) in hidden], [p for p in held if id(p) not in hidden])


def built(inner: Inner, matrices: Sequence[Tensor], others: Sequence[Tensor]) -> Optimizers:
    """Make the optimizers of parameters of which Muon may have the ``matrices``; any other has all."""
    own = inner.own()
    if inner.optimizer_name != "muon":
        return [_MAKERS[inner.optimizer_name](inner, own, [*matrices, *others])]
    parts = (_muon, matrices), (_adamw, others)
    return [make(inner, own, held) for make, held in parts if held]


def forward_only(inner: Inner, named: Sequence[tuple[str, Tensor]], seed: int | None = None) -> torch.optim.Optimizer:
    """Make the optimizer that steps by losses alone, for parameters by their names in the model; ``seed``: see SPSA."""
    return SPSA(named, lr=inner.learning_rate, seed=seed)


def _matrices_inside(model: nn.Module) -> list[Tensor]:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()  # transformers' models; others may tie or not
    apart = {id(p) for module in [*embeddings, *([head] if head is not None else [])] for p in module.parameters()}
    return [parameter for parameter in model.parameters() if parameter.ndim == 2 and id(parameter) not in apart]


def _betas(own: OwnValues) -> tuple[float, float]:
    return own["beta1"], own["beta2"]


def _adamw(inner: Inner, own: OwnValues, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    rate, decay, one_pass = inner.learning_rate, inner.weight_decay, _in_one_pass(held)
    return torch.optim.AdamW(held, lr=rate, betas=_betas(own), weight_decay=decay, fused=one_pass)


def _in_one_pass(held: Sequence[Tensor]) -> bool | None:
    """Tell whether torch has a kernel for whole steps: 29 small tensors on a processor take 0.15 ms, else 0.96."""
    here = all(p.device.type in {"cpu", "cuda"} and p.is_floating_point() for p in held)
    return here or None  # None: as torch chooses


def _muon(inner: Inner, own: OwnValues, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(
        held,
        lr=inner.learning_rate,
        weight_decay=inner.weight_decay,
        momentum=own["momentum"],
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )


def _sgd(inner: Inner, own: OwnValues, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(held, lr=inner.learning_rate, momentum=own["momentum"], weight_decay=inner.weight_decay)


def _adopt(inner: Inner, own: OwnValues, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return ADOPT(held, lr=inner.learning_rate, betas=_betas(own), weight_decay=inner.weight_decay)


def _qh_adopt(inner: Inner, own: OwnValues, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return QHADOPT(
        held, lr=inner.learning_rate, betas=_betas(own), mixing=own["mixing"], weight_decay=inner.weight_decay
    )


def _schedule_free(inner: Inner, own: OwnValues, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return ScheduleFree(
        held, lr=inner.learning_rate, beta2=own["beta2"], mixing=own["mixing"], weight_decay=inner.weight_decay
    )


def _gpa(inner: Inner, own: OwnValues, held: Sequence[Tensor]) -> torch.optim.Optimizer:
    return GPA(
        held,
        lr=inner.learning_rate,
        betas=_betas(own),
        mixing=own["mixing"],
        averaging=own["averaging"],
        weight_decay=inner.weight_decay,
    )


_MAKERS: Final[Mapping[InnerName, Callable[[Inner, OwnValues, Sequence[Tensor]], torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "adopt": _adopt,
    "sgd": _sgd,
    "schedule_free": _schedule_free,
    "gpa": _gpa,
    "qh_adopt": _qh_adopt,
}

# ---- the inner learning rate ----
#
# A linear warm-up, then constant, because a swarm's run has no known last step.


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Factor on the learning rate at an inner step, from 0: (step + 1) / num_steps, at most 1."""

    num_steps: int  # 0: no warm-up

    def __post_init__(self) -> None:
        if self.num_steps < 0:
            raise ConfigError(f"warmup = {self.num_steps}: must be 0 or more inner steps")

    def __call__(self, step: int) -> float:
        """Return the factor for the inner step that comes after ``step`` others."""
        return min(1.0, (step + 1) / max(1, self.num_steps))


def warm_up(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """Rise over ``num_steps`` inner steps, then stay. Its state_dict is plain numbers."""
    factor = WarmUp(num_steps)
    return LambdaLR(optimizer, lambda step: factor(step))


# ---- one inner step ----
#
# It goes by gradients or by losses alone, as the manifest's optimizer wants it.


def _nothing() -> None:
    """Do nothing before the step."""


def inner_step(
    inner: Inner,
    optimizers: Sequence[Any],  # Any: accelerate's wrapper has no type
    loss: Callable[[], Tensor],
    *,
    backward: Callable[[Tensor], object] = Tensor.backward,
    begins: Callable[[], None] = _nothing,
) -> Tensor:
    """Step each of ``optimizers`` once, and return the loss that it went by. Gradients stay as they are: clear them.

    ``backward``: makes the gradients, and clips them; not called where losses are enough. ``begins``: called when all
    is there that the step goes by, before a parameter moves for good.
    """
    if INNER_OPTIMIZERS[inner.optimizer_name].forward_only:
        begins()
        return step_forward(optimizers[0], loss)
    value = loss()
    backward(value)
    begins()
    for optimizer in optimizers:
        optimizer.step()  # a round may begin or end in the last one's
    return value


# ---- settings that differ from the manifest ----
#
# A peer that trains at other settings than the rest wastes a run, or ruins it: one at a learning rate of 0.5 ended a
# run at an accuracy of 0.09, and every process with exit code 0. Its loop is its own, so this is a warning and no
# refusal.

Difference = tuple[str, str, str]  # key, in the manifest, in the loop


def differences(inner: Inner, optimizers: Sequence[torch.optim.Optimizer]) -> list[Difference]:
    """List keys of ``[inner]`` that no parameter group of any optimizer agrees with; a group's own rate is a choice.

    The optimizer's own keys are compared where the manifest sets them.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = [
        _differs("learning_rate", inner.learning_rate, _numbers(map(_highest_rate, groups))),
        _differs("weight_decay", inner.weight_decay, _numbers(map(_decay, groups))),
        _another(inner, [type(optimizer).__name__ for optimizer in optimizers]),
    ]
    if found[-1] is None:
        found += [_differs(key, getattr(inner, key), _values_of(key, groups)) for key in _set_keys(inner)]
    return [difference for difference in found if difference is not None]


def _highest_rate(group: Mapping[str, Any]) -> float | None:
    """Read a rate: schedulers keep the first as ``initial_lr``, OneCycleLR the one it goes up to as ``max_lr``."""
    return next(iter(_numbers(_number(group.get(key)) for key in ("max_lr", "initial_lr", "lr"))), None)


def _decay(group: Mapping[str, Any]) -> float | None:
    return _number(group.get("weight_decay", 0.0))


def _number(value: object) -> float | None:
    """Read a number, of a tensor, too. None for what is no number to compare: Adafactor finds its rate itself, and has
    None for it, other packages a function of the step.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    return float(value) if isinstance(value, int | float) else None


def _numbers(found: Iterable[float | None]) -> list[float]:
    return [one for one in found if one is not None]


def _another(inner: Inner, names: Sequence[str]) -> Difference | None:
    """Return None when a class of these ``names`` is the manifest's optimizer, as an AdamW8bit is an AdamW."""
    title = INNER_OPTIMIZERS[inner.optimizer_name].title
    return None if inner.optimizer_name in map(_kind_of, names) else ("optimizer", title, " and ".join(names))


def _kind_of(name: str) -> InnerName | None:
    """Read the kind off a name: an AdamWScheduleFree is not an AdamW, nor a QHADOPT an ADOPT."""
    order: Sequence[InnerName] = ("qh_adopt", "schedule_free", "gpa", "muon", "adopt", "adamw", "spsa", "sgd")
    found = (known for known in order if _letters(INNER_OPTIMIZERS[known].title) in _letters(name))
    return next(found, None)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _set_keys(inner: Inner) -> list[str]:
    return [key for key in OWN_KEYS if getattr(inner, key) is not None]


def _values_of(key: str, groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """Read a key by the group's own name for it, or as one of torch's two betas."""
    if key in ("beta1", "beta2"):
        betas = [group.get("betas") for group in groups]
        pairs = [two for two in betas if isinstance(two, list | tuple) and len(two) == 2]
        return _numbers(_number(pair[int(key[-1]) - 1]) for pair in pairs)
    return _numbers(_number(group.get(key)) for group in groups)


def read_inner_settings(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, float | str]:
    """Read the keys of ``[inner]`` by which a loop trains off its first optimizer: kind, highest rate and decay.

    The kind is left out where no manifest can name it, and so is a rate or a decay that is no number.
    """
    first = optimizers[0]
    rates, decays = (_numbers(map(of, first.param_groups)) for of in (_highest_rate, _decay))
    found: dict[str, float | str] = {
        key: max(given) for key, given in (("learning_rate", rates), ("weight_decay", decays)) if given
    }
    kind = _kind_of(type(first).__name__)
    return found if kind is None else {**found, "optimizer": kind}


def differences_sentence(found: Sequence[Difference]) -> str:
    """Tell people of them."""
    each = ", ".join(f"{key} is {there} in the manifest and {here} in this loop" for key, there, here in found)
    alike = ", ".join(f"{key} = {_as_toml(here)}" for key, _, here in found if " and " not in here)
    return (
        f"inner optimizer: {each}; peers that train at other settings than the rest can ruin a run: make the loop's as "
        f"the manifest's, or found the next run with {alike or 'the key as the loop has it'} under [inner]"
    )


def _as_toml(here: str) -> str:
    """Write a number as it is, and an optimizer by the word that a manifest has for it."""
    kind = _kind_of(here)
    return here if kind is None else f'"{kind}"'


def _differs(key: str, wanted: float, given: Sequence[float]) -> Difference | None:
    if any(math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-12) for value in given):
        return None
    if not given:  # no group names it: another package has other names
        return None
    return key, f"{wanted:g}", " and ".join(f"{value:g}" for value in sorted(set(given)))


# ---- the steps of a loop ----
#
# One inner step is one more step of each of them, Muon for the matrices and AdamW for the rest, say. What else the loop
# does with its optimizers is its own business, so an optimizer that it never steps is only seen by what goes on without
# it: then the parameters change from one backward pass to another, and no step of the optimizer that was given came
# between. It is told once and ends nothing, as loops do the like on purpose: a perturbation of K ascents moves the
# parameters K times inside each step, meta-learning follows another optimizer for a while, and critics train before
# their generator. Only an optimizer that never made a step at all ends such a loop: it would go on for ever.

UNSEEN = 100  # backward passes in a row after which changes by somebody else are told
NEVER = 1000  # after which an optimizer that never stepped is an error
ONLY_OTHERS = 100  # steps of one optimizer while another of the list has made none
STRANGERS = 16  # steps of optimizers that join was not given, with none of those that it was

logger = logging.getLogger("decentral.training")


def check_covers(optimizers: Sequence[torch.optim.Optimizer], trained: Mapping[str, Tensor]) -> None:
    """Raise ConfigError unless each optimizer holds some of the model's trained parameters, and all are held."""
    held = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    wanted = {id(parameter) for parameter in trained.values()}
    if not held:
        raise ConfigError("join: an empty list of optimizers; give those that the loop steps")
    for optimizer, ids in zip(optimizers, held, strict=True):
        if not ids & wanted:
            raise ConfigError(
                f"join: the {type(optimizer).__name__} holds none of the model's {len(trained)} trained parameters; "
                "give join the model, and the optimizer that was made from its parameters()"
            )
    covered = set().union(*held)
    missing = [name for name, parameter in trained.items() if id(parameter) not in covered]
    if missing:
        raise ConfigError(
            f"join: {len(missing)} of {len(trained)} trained parameters are in none of the optimizers, {missing[0]} "
            "first; give all optimizers as a list, freeze what is not trained with requires_grad_(False), or name what "
            "the loop moves itself, as a teacher: join(moved=[...])"
        )


@dataclass(slots=True)
class _StrayGuard:
    """Notices a loop that steps something else: counts backward passes at one parameter between an optimizer's steps,
    and looks at some of its values now and then.
    """

    has_nobody_stepped: Callable[[], bool]  # of all the optimizers: phases may begin with another one
    passes: int = 0  # since a step of the optimizer began
    then: Tensor | None = None  # some values at the second of them: most steps have one
    inside: bool = False  # the step: LBFGS evaluates its closure there, at one trial point after the other
    stepped: bool = False
    has_warned: bool = False

    def before_step(self, *_: object) -> None:
        self.passes, self.inside, self.stepped = 0, True, True

    def after_step(self, *_: object) -> None:
        self.inside = False

    def backward(self, parameter: Tensor) -> None:
        """Warn once the loop is seen to step something else; ConfigError where it never did otherwise.

        What this peer writes falls into its step. Accumulated gradients change nothing in between.
        """
        if self.inside or (self.has_warned and self.stepped):
            return
        self.passes += 1
        if self.passes == 2:
            self.then = _some_of(parameter)
        if self.passes % UNSEEN or self.then is None or torch.equal(_some_of(parameter), self.then):
            return
        why = (
            f"the model's parameters changed in {self.passes} backward passes, but the optimizer that was given to "
            "join does not step, and rounds are of its steps: give join the one whose step() the loop calls"
        )
        if self.passes >= NEVER and self.has_nobody_stepped():
            raise ConfigError(why)
        if not self.has_warned:
            self.has_warned = True
            logger.warning("%s", why)


def _some_of(parameter: Tensor) -> Tensor:
    return local_part(parameter).flatten()[:64].clone()


Stage = Literal["between", "inside", "at_boundary"]


@dataclass(slots=True)
class InnerSteps:
    """Counts: ``on_step`` is called inside the ``step`` that makes each optimizer have stepped once more, and
    ``on_begin``, if there is one, before the first of those steps: all of them go by the gradients of that moment.
    ``on_any`` is called before every step of any of them; ``on_strangers`` where only optimizers step that are none of
    them, after ``STRANGERS`` of their steps, twice as many, and so on: the script may have made another one; ``after``
    when all is done that belongs to a step of any of them.

    ``stage``: ``inside`` the step of an optimizer its parameters and its state are of two moments; ``at_boundary``
    ``on_step`` is called, or has failed; ``between`` two steps, of one optimizer or of two, all is of one moment.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    on_step: Callable[[], None]
    on_begin: Callable[[], None] | None = None
    on_any: Callable[[], None] = _nothing
    on_strangers: Callable[[], None] = _nothing
    after: Callable[[], None] = _nothing
    stage: Stage = "between"
    _since: set[int] = field(default_factory=set)  # optimizers that stepped since the last inner step
    _times: list[int] = field(default_factory=list)  # steps of each
    _has_warned_of_idle: bool = False
    _strangers: int = 0  # steps of others since the last of these
    _thread: int = 0
    _ids: set[int] = field(default_factory=set)  # of the optimizers: a loop may have one for each parameter
    _trained: set[int] = field(default_factory=set)  # ids of parameters

    def hook(self, trained: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """Hook all until the returned context ends. ``trained``: the model's parameters."""
        self._times, self._thread = [0] * len(self.optimizers), threading.get_ident()
        self._ids = set(map(id, self.optimizers))
        self._trained = wanted = {id(parameter) for parameter in trained.values()}
        with ExitStack() as stack:
            stack.callback(register_optimizer_step_post_hook(self._stranger_ends).remove)
            for number, optimizer in enumerate(self.optimizers):
                guard, mine = _StrayGuard(lambda: not any(self._times)), _first_of(optimizer, wanted)
                stack.callback(optimizer.register_step_pre_hook(guard.before_step).remove)
                stack.callback(optimizer.register_step_pre_hook(self._begins).remove)
                stack.callback(optimizer.register_step_post_hook(guard.after_step).remove)
                stack.callback(optimizer.register_step_post_hook(lambda one, *_, n=number: self._ends(one, n)).remove)
                if mine is not None:
                    added = mine.register_post_accumulate_grad_hook(guard.backward)  # type: ignore[no-untyped-call]
                    stack.callback(added.remove)
            return stack.pop_all()

    def _begins(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._strangers = 0
        self.on_any()
        self.stage = "inside"
        if self.on_begin is None or self._since or _is_skipped(optimizer):
            return
        by_losses = getattr(optimizer, "derivatives", None) is not None
        if not by_losses and any(given is not None for given in (*args[1:], *kwargs.values())):
            raise ConfigError(
                f"{type(optimizer).__name__}.step was given a closure, which makes the gradients inside the step; the "
                "run's outer method changes them before: call backward() in the loop, and step() without a closure"
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} is fused, and its gradients are still multiplied by a GradScaler, but the "
                "run's outer method changes them: call scaler.unscale_(optimizer) before the step, or use fused=False"
            )
        self.on_begin()

    def _stranger_ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Count a step of another optimizer; other threads train models of their own."""
        mine = self.stage == "inside" or id(optimizer) in self._ids
        if mine or threading.get_ident() != self._thread:
            return
        self._strangers += 1
        if self._strangers >= STRANGERS and self._strangers.bit_count() == 1:
            self.on_strangers()
        held = (id(one) for group in optimizer.param_groups for one in group["params"])
        if self._strangers % NEVER == 0 and not self._trained.isdisjoint(held):
            raise ConfigError(
                f"the last {NEVER} steps were of optimizers that join was not given, with parameters that it shares in "
                f"this {type(optimizer).__name__}, so no round would ever come; make it before join(), and give join "
                "all that the loop steps"
            )

    def _ends(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        self.stage = "at_boundary"
        if not _is_skipped(optimizer):
            self._has_stepped(number)
        self.stage = "between"
        self.after()

    def _has_stepped(self, number: int) -> None:
        self._times[number] += 1
        self._since.add(number)
        if len(self._since) == len(self.optimizers):
            self._since.clear()
            self.on_step()
        elif self._times[number] >= ONLY_OTHERS and 0 in self._times and not self._has_warned_of_idle:
            self._has_warned_of_idle = True
            logger.warning(
                "of the optimizers given to join one made %d steps and the %s none, and an inner step is one more of "
                "each: rounds begin with its first; where the loop never steps it, give join the others only",
                self._times[number],
                type(self.optimizers[self._times.index(0)]).__name__,
            )


def make_hookable(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer call hooks, as a class of torch's does once one is made; wrappers often leave that out.

    ConfigError where that cannot be made up for.
    """
    if not hasattr(optimizer, HOOKS):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"join: the {type(optimizer).__name__} is no torch.optim.Optimizer, so that nothing can follow its "
                "steps; derive it from that, or give join the optimizer inside"
            )
        with suppress(AttributeError):  # as a copy gets what Optimizer.__init__ makes, which opacus' does not call
            torch.optim.Optimizer.__setstate__(optimizer, {})
    if getattr(type(optimizer).step, "hooked", False):
        return
    optimizer._patch_step_function()
    if (scheduled := vars(optimizer).get("step")) is not None:  # a scheduler's, around the step as it was

        @functools.wraps(scheduled)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return scheduled(*args, **kwargs)

        optimizer.step = MethodType(optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]


def _is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether its step changes nothing: a GradScaler that found an overflow calls a fused one nevertheless.

    The flag is on the model's device, and is waited for, as GradScaler does for an optimizer that is not fused.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)


def _first_of(optimizer: torch.optim.Optimizer, wanted: set[int]) -> Tensor | None:
    """Return one of its parameters of ``wanted`` that is trained here; None: this peer trains a part without them."""
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    return next((one for one in parameters if id(one) in wanted and one.requires_grad), None)
