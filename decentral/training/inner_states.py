"""Inner optimizers and schedules that join was given, and their state with the random generators' in a checkpoint.

State of a sharded parameter is sharded as the parameter is. It is collected on the main process and spread again, so
that a checkpoint of two processes is resumed by one, or by four. Every process has generators of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.parameters.schema import is_sharded, local_part
from decentral.state.checkpoint import fill_in, flatten, random_state, set_random_state, storable, unflatten
from decentral.tensors.ops import is_finite
from decentral.training.processes import MAIN, Order, Orders, Processes, Shards, hold_interrupts

# ---- several optimizers as one ----

HOOKS = "_optimizer_step_post_hooks"  # of an optimizer that torch calls hooks of


@dataclass(frozen=True, slots=True)
class Together:
    """Optimizers, or schedulers, that are saved and restored in their order. ``Any``: schedulers share no base."""

    parts: tuple[Any, ...]

    @classmethod
    def of(cls, given: object, attribute: str, caller: str = "join") -> Together:
        """Take one or several, without accelerate's wrapper, which keeps the bare one under ``attribute``.

        ConfigError for what is none, in the name of the ``caller``.
        """
        several = given if isinstance(given, list | tuple) else [given]
        for one in several:
            if why := _is_no_optimizer(one) if attribute == "optimizer" else _is_no_scheduler(one):
                raise ConfigError(f"{caller}: the {attribute} is {why}")
        return cls(tuple(one if _steps_by_itself(one) else getattr(one, attribute, one) for one in several))

    def state_dict(self) -> list[Any]:
        """Return the state of each, without parts that the script makes anew."""
        return [storable(part.state_dict()) for part in self.parts]

    def load_state_dict(self, states: Any) -> None:
        """Restore each. ConfigError for another number of them."""
        for part, state in zip(self.parts, self.assign(states), strict=True):
            part.load_state_dict(fill_in(state, part.state_dict()))

    def assign(self, states: Any) -> list[Any]:
        """Give each its state; a single state that is no list is of a checkpoint with one. ConfigError otherwise."""
        saved = states if isinstance(states, list) else [states]
        if len(saved) != len(self.parts):
            raise ConfigError(
                f"the checkpoint holds {len(saved)} optimizers or schedulers, join was given {len(self.parts)}; "
                "give it the same ones in the same order, or choose another run directory"
            )
        return saved


def _is_no_optimizer(given: object) -> str:
    """Say what it is instead, and what to do; "" of an optimizer. A schedule or a Trainer, which holds one, is none."""
    if _has_groups(given):
        return ""
    name = _describe(given)
    if isinstance(given, type):
        return f"{name}; make one: torch.optim.AdamW(model.parameters())"
    if hasattr(given, "get_last_lr") or isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return f"{name}, which is a schedule; pass the optimizer, and join(scheduler=...) for the schedule"
    if hasattr(given, "lr_scheduler") or hasattr(given, "lr_scheduler_configs"):
        return f"{name}; it steps by itself: give it callbacks=[DecentralCallback(run)] of decentral.integrations"
    if isinstance(given, nn.Module):
        return f"{name}, which is a model; pass join(run, model, optimizer)"
    if _has_groups(getattr(given, "optimizer", None)) and hasattr(given, "step"):  # it sets the rate, and steps that
        return ""
    if isinstance(given, Tensor) or hasattr(given, "__next__"):
        return f"{name}; pass the optimizer that was made of the parameters"
    return f"{name}; pass what the loop calls step of"


def _has_groups(given: object) -> bool:
    return hasattr(given, "param_groups") and hasattr(given, "state_dict") and not isinstance(given, type)


def _is_no_scheduler(given: object) -> str:
    if hasattr(given, "param_groups"):
        return f"{_describe(given)}, which is an optimizer; pass it as optimizer, and here the schedule"
    if isinstance(given, type) or not hasattr(given, "state_dict") or not hasattr(given, "load_state_dict"):
        return f"{_describe(given)}; pass the schedule that the loop steps, with state_dict and load_state_dict"
    return ""


def _describe(given: object) -> str:
    if given is None:
        return "missing"
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


def _steps_by_itself(one: Any) -> bool:
    """Tell whether it is an optimizer around another, as Lookahead is, whose own step is the one that counts;
    accelerate's and Lightning's hand the step on.
    """
    hands_on = type(one).__module__.partition(".")[0] in ("accelerate", "lightning", "pytorch_lightning")
    return isinstance(one, torch.optim.Optimizer) and hasattr(one, HOOKS) and not hands_on


# ---- settings that a restart changed ----
#
# A checkpoint's optimizer comes back with the settings that it had, and a schedule with the rates that it began with.
# Who changes the rate in the script and starts it again would train on at the old one without a word.

Numbers = list[dict[str, list[float]]]  # by parameter group, the settings that are numbers


def numbers_of(optimizer: torch.optim.Optimizer) -> Numbers:
    """Read them off its groups; for a rate the one that a schedule begins with."""
    found: Numbers = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
        settings["lr"] = group.get("initial_lr", group.get("lr"))
        listed = {key: list(value) if isinstance(value, tuple) else [value] for key, value in settings.items()}
        found.append({key: [float(one) for one in many] for key, many in listed.items() if _are_numbers(many)})
    return found


def _are_numbers(many: Sequence[object]) -> bool:
    return bool(many) and all(
        not isinstance(one, bool) and (isinstance(one, int | float) or (isinstance(one, Tensor) and one.numel() == 1))
        for one in many
    )


def describe_changes(before: Sequence[Numbers], now: Sequence[Numbers]) -> str:
    """Say which settings are others in the script than when the checkpoint's peer was first joined, and which count.

    "" where none is.
    """
    found: list[str] = []
    for one, other in zip(before, now, strict=False):
        for then, given in zip(one, other, strict=False):
            keys = [key for key in then if key in given and then[key] != given[key]]
            found += [f"{key} is {_write(given[key])} here and {_write(then[key])} in the checkpoint" for key in keys]
    if not found:
        return ""
    return (
        f"settings of the optimizer were changed: {', '.join(dict.fromkeys(found))}; the checkpoint's count, until the "
        "loop sets others inside the with block (group['lr'] of optimizer.param_groups, and base_lrs of a schedule)"
    )


def _write(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


# ---- the state in a checkpoint ----
#
# It is whole, whoever wrote it. A sharded state is collected on the main process and spread again.

Tree = Any  # nested as `flatten` takes it

APART = "of a sharded parameter"  # stands for a tensor that is spread by itself


class InnerStates:
    """States on every process of a peer; ``keep`` and ``restore`` are called on the main one."""

    def __init__(self, optimizers: Together, schedulers: Together | None, orders: Orders | None) -> None:
        self._optimizers, self._schedulers, self._orders = optimizers, schedulers, orders
        self._settings = [numbers_of(optimizer) for optimizer in optimizers.parts]  # as the script has them
        if orders is not None:
            self._shards = Shards(orders.processes)
            orders.means({Order.KEEP: lambda _: self._keep(orders.processes)})
            orders.means({Order.RESTORE: lambda _: self._restore(orders.processes, None)})

    def keep(self) -> Tree:
        """Copy all of it, for ``flatten``."""
        if self._orders is None:
            return self._own()
        with hold_interrupts():
            self._orders.give(Order.KEEP)
            return self._keep(self._orders.processes)

    def restore(self, tree: Tree) -> None:
        """Put back what ``keep`` gave, on all processes."""
        if self._orders is None:
            self._put(tree["optimizer"], tree)
            return
        self._optimizers.assign(tree["optimizer"])  # or it is refused, before the others are asked
        with hold_interrupts():
            self._orders.give(Order.RESTORE)
            self._restore(self._orders.processes, tree)

    def forget_non_finite(self) -> None:
        """Drop states with NaN or Inf, alike on all processes, which all ask."""
        agree = (lambda found: found) if self._orders is None else self._orders.processes.any_of
        for optimizer in self._optimizers.parts:
            forget_non_finite(optimizer, agree)

    # ---- on one process ----

    def _own(self) -> Tree:
        return {
            "optimizer": self._optimizers.state_dict(),
            "scheduler": None if self._schedulers is None else self._schedulers.state_dict(),
            "random": random_state(),
            "settings": self._settings,
        }

    def _put(self, optimizer: Tree, tree: Tree) -> None:
        self._optimizers.load_state_dict(optimizer)
        self._warn_of_changes(tree.get("settings", self._settings))  # an older checkpoint has none
        if self._schedulers is not None and tree["scheduler"] is not None:
            self._schedulers.load_state_dict(tree["scheduler"])
        if tree["random"] is not None:
            set_random_state(tree["random"])

    def _warn_of_changes(self, before: list[Numbers]) -> None:
        """Warn of settings that the script has changed since the peer of the checkpoint was first joined."""
        sentence = describe_changes(before, self._settings)
        if sentence and (self._orders is None or self._orders.processes.is_main):
            logging.getLogger("decentral").warning(sentence)
        self._settings = before  # they count on, and are told at the next start, too

    # ---- on all of them at once ----

    def _keep(self, processes: Processes) -> Tree:
        own = self._own()
        own["optimizer"] = _apart_from_what_is_trained(own["optimizer"])
        for state, name, parameter in self._in_parts(own["optimizer"]):
            if state[name].shape != parameter.shape:
                raise ConfigError(
                    f"the inner optimizer's {name} is sharded, and not as its parameter of shape "
                    f"{tuple(parameter.shape)} is; no checkpoint can hold that: choose another inner optimizer"
                )
            state[name] = self._shards.whole(state[name])
        own["others"] = [own["random"]]
        for rank in range(1, processes.size):  # each sends its own
            if processes.is_main:
                own["others"].append(receive_tree(processes, rank))
            elif processes.rank == rank:
                send_tree(processes, own["random"])
        del own["others"][0]
        return own

    def _restore(self, processes: Processes, tree: Tree | None) -> None:
        """``tree`` is there on the main process."""
        spread: list[Tensor] = []
        rest = None if tree is None else {**tree, "optimizer": self._without_sharded(tree["optimizer"], spread)}
        rest = tell_tree(processes, rest)
        for state, name, parameter in self._apart(rest["optimizer"]):
            dtype = state[name][1]
            made = torch.zeros_like(parameter.detach(), dtype=getattr(torch, dtype))
            self._shards.spread(spread.pop(0) if tree is not None else None, made)
            state[name] = made
        if not processes.is_main:
            others = rest.get("others", [])
            rest["random"] = others[processes.rank - 1] if processes.rank <= len(others) else None
        self._put(rest["optimizer"], rest)

    def _without_sharded(self, states: Tree, spread: list[Tensor]) -> Tree:
        """Move states that are spread by themselves to ``spread``, and put `APART` with a dtype in their place."""
        made = _apart_from_what_is_trained(self._optimizers.assign(states))
        for held, name, parameter in self._held(made):
            if is_sharded(parameter) and isinstance(held[name], Tensor) and held[name].shape == parameter.shape:
                spread.append(held[name])
                held[name] = (APART, str(held[name].dtype).removeprefix("torch."))
        return made

    def _in_parts(self, states: list[Tree]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        return ((h, n, p) for h, n, p in self._held(states) if isinstance(h[n], Tensor) and is_sharded(h[n]))

    def _apart(self, states: list[Tree]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        return ((h, n, p) for h, n, p in self._held(states) if isinstance(h[n], tuple) and h[n][:1] == (APART,))

    def _held(self, states: list[Tree]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Go through every optimizer's state of every parameter by name, in an order that all processes have alike."""
        for optimizer, state in zip(self._optimizers.parts, states, strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for number, parameter in enumerate(parameters):
                held = state["state"].get(number, {})
                for name in sorted(held):
                    yield held, name, parameter


def _apart_from_what_is_trained(states: list[Tree]) -> list[Tree]:
    """Copy each state's dicts: an optimizer's own dict of a parameter is in the outcome of ``state_dict``, too."""
    return [{**state, "state": {key: dict(held) for key, held in state["state"].items()}} for state in states]


def forget_non_finite(
    optimizer: torch.optim.Optimizer, agree: Callable[[list[int]], list[int]] = lambda found: found
) -> int:
    """Drop an inner optimizer's state of every parameter where it holds NaN or Inf; return the number of them.

    Such moments would make the parameter NaN again at the next step. It starts anew there, as a joiner does everywhere.
    ``agree``: among the processes of a peer, each of which holds a part of a parameter's state.
    """
    held = list(optimizer.state.items())
    found = [int(any(isinstance(one, Tensor) and _is_poisoned(one) for one in state.values())) for _, state in held]
    poisoned = [parameter for (parameter, _), is_poisoned in zip(held, agree(found), strict=True) if is_poisoned]
    for parameter in poisoned:
        del optimizer.state[parameter]
    return len(poisoned)


def _is_poisoned(value: Tensor) -> bool:
    return value.is_floating_point() and not is_finite(local_part(value))


def send_tree(processes: Processes, tree: Tree) -> None:
    """Send a tree to the main process."""
    head, tensors = _pack(tree)
    processes.send(torch.tensor([len(head)], dtype=torch.int64, device="cpu"), MAIN)
    processes.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), MAIN)
    for tensor in tensors:
        processes.send(tensor, MAIN)


def receive_tree(processes: Processes, sender: int) -> Tree:
    """Receive the tree that ``sender`` sends."""
    nbytes = torch.zeros(1, dtype=torch.int64, device="cpu")
    processes.receive(nbytes, sender)
    head = torch.empty(int(nbytes), dtype=torch.uint8, device="cpu")
    processes.receive(head, sender)
    return _unpack(head.numpy().tobytes(), lambda tensor: processes.receive(tensor, sender))


def tell_tree(processes: Processes, tree: Tree | None) -> Tree:
    """Give all processes the main one's tree, and that one a copy."""
    if not processes.is_main:
        return _unpack(processes.tell_bytes(b""), processes.broadcast)
    head, tensors = _pack(tree)
    processes.tell_bytes(head)
    for tensor in tensors:
        processes.broadcast(tensor)
    return _unpack(head, lambda tensor: tensor.copy_(tensors.pop(0)))


def _pack(tree: Tree) -> tuple[bytes, list[Tensor]]:
    tensors, document = flatten(tree, "t")
    shapes = [[name, list(one.shape), str(one.dtype).removeprefix("torch.")] for name, one in tensors.items()]
    return json.dumps([document, shapes]).encode(), list(tensors.values())


def _unpack(head: bytes, fill: Any) -> Tree:  # Any: a tensor's values come from somewhere
    document, shapes = json.loads(head)
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") for name, shape, dtype in shapes}
    for tensor in tensors.values():
        fill(tensor)
    return unflatten(document, tensors)
