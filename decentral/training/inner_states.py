"""Inner optimizer, schedule and random generators of a peer, as a checkpoint keeps them: whole, whoever wrote it.

State of a sharded parameter is sharded as the parameter is. It is collected on the main process and spread again, so
that a checkpoint of two processes is resumed by one, or by four. Every process has generators of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.parameters.schema import is_sharded
from decentral.state.checkpoint import flatten, random_state, set_random_state, unflatten
from decentral.training.clocks import Numbers, changed_sentence, numbers_of
from decentral.training.inner import Together
from decentral.training.outer_loop import forget_non_finite
from decentral.training.processes import MAIN, Order, Orders, Processes, Shards, undisturbed

Tree = Any  # nested as `flatten` takes it

APART = "of a sharded parameter"  # stands for a tensor that is spread by itself


class InnerStates:
    """On every process of a peer; ``kept`` and ``restore`` are asked for on the main one."""

    def __init__(self, optimizers: Together, schedulers: Together | None, orders: Orders | None) -> None:
        self._optimizers, self._schedulers, self._orders = optimizers, schedulers, orders
        self._settings = [numbers_of(optimizer) for optimizer in optimizers.parts]  # as the script has them
        if orders is not None:
            self._shards = Shards(orders.processes)
            orders.means({Order.KEEP: lambda _: self._keep(orders.processes)})
            orders.means({Order.RESTORE: lambda _: self._restore(orders.processes, None)})

    def kept(self) -> Tree:
        """All of it, for ``flatten``."""
        if self._orders is None:
            return self._own()
        with undisturbed():
            self._orders.give(Order.KEEP)
            return self._keep(self._orders.processes)

    def restore(self, tree: Tree) -> None:
        """Put back what ``kept`` gave, on all processes."""
        if self._orders is None:
            self._put(tree["optimizer"], tree)
            return
        self._optimizers.listed(tree["optimizer"])  # or it is refused, before the others are asked
        with undisturbed():
            self._orders.give(Order.RESTORE)
            self._restore(self._orders.processes, tree)

    def forget_non_finite(self) -> None:
        """Drop what is NaN or Inf, alike on all processes, which all ask."""
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
        self._tell_changed(tree.get("settings", self._settings))  # an older checkpoint has none
        if self._schedulers is not None and tree["scheduler"] is not None:
            self._schedulers.load_state_dict(tree["scheduler"])
        if tree["random"] is not None:
            set_random_state(tree["random"])

    def _tell_changed(self, before: list[Numbers]) -> None:
        """Warn of settings that the script has changed since the peer of the checkpoint was first joined."""
        sentence = changed_sentence(before, self._settings)
        if sentence and (self._orders is None or self._orders.processes.is_main):
            logging.getLogger("decentral").warning(sentence)
        self._settings = before  # they count on, and are told at the next start, too

    # ---- on all of them at once ----

    def _keep(self, processes: Processes) -> Tree:
        own = self._own()
        own["optimizer"] = _apart_from_what_is_trained(own["optimizer"])
        for state, name, parameter in self._sharded(own["optimizer"]):
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
        """Those states that are spread by themselves go to ``spread``, and `APART` with a dtype in their place."""
        made = _apart_from_what_is_trained(self._optimizers.listed(states))
        for held, name, parameter in self._held(made):
            if is_sharded(parameter) and isinstance(held[name], Tensor) and held[name].shape == parameter.shape:
                spread.append(held[name])
                held[name] = (APART, str(held[name].dtype).removeprefix("torch."))
        return made

    def _sharded(self, states: list[Tree]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        return ((h, n, p) for h, n, p in self._held(states) if isinstance(h[n], Tensor) and is_sharded(h[n]))

    def _apart(self, states: list[Tree]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        return ((h, n, p) for h, n, p in self._held(states) if isinstance(h[n], tuple) and h[n][:1] == (APART,))

    def _held(self, states: list[Tree]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """What every optimizer holds of every parameter, by name, in an order that all processes have alike."""
        for optimizer, state in zip(self._optimizers.parts, states, strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for number, parameter in enumerate(parameters):
                held = state["state"].get(number, {})
                for name in sorted(held):
                    yield held, name, parameter


def _apart_from_what_is_trained(states: list[Tree]) -> list[Tree]:
    """What an optimizer holds of a parameter is its own dict, in what ``state_dict`` gives, too."""
    return [{**state, "state": {key: dict(held) for key, held in state["state"].items()}} for state in states]


def send_tree(processes: Processes, tree: Tree) -> None:
    """To the main process."""
    head, tensors = _packed(tree)
    processes.send(torch.tensor([len(head)], dtype=torch.int64, device="cpu"), MAIN)
    processes.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), MAIN)
    for tensor in tensors:
        processes.send(tensor, MAIN)


def receive_tree(processes: Processes, sender: int) -> Tree:
    """What ``sender`` sends."""
    nbytes = torch.zeros(1, dtype=torch.int64, device="cpu")
    processes.receive(nbytes, sender)
    head = torch.empty(int(nbytes), dtype=torch.uint8, device="cpu")
    processes.receive(head, sender)
    return _unpacked(head.numpy().tobytes(), lambda tensor: processes.receive(tensor, sender))


def tell_tree(processes: Processes, tree: Tree | None) -> Tree:
    """The main process's, to all: a copy of it there, too."""
    if not processes.is_main:
        return _unpacked(processes.tell_bytes(b""), processes.broadcast)
    head, tensors = _packed(tree)
    processes.tell_bytes(head)
    for tensor in tensors:
        processes.broadcast(tensor)
    return _unpacked(head, lambda tensor: tensor.copy_(tensors.pop(0)))


def _packed(tree: Tree) -> tuple[bytes, list[Tensor]]:
    tensors, document = flatten(tree, "t")
    shapes = [[name, list(one.shape), str(one.dtype).removeprefix("torch.")] for name, one in tensors.items()]
    return json.dumps([document, shapes]).encode(), list(tensors.values())


def _unpacked(head: bytes, fill: Any) -> Tree:  # Any: a tensor's values come from somewhere
    document, shapes = json.loads(head)
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype), device="cpu") for name, shape, dtype in shapes}
    for tensor in tensors.values():
        fill(tensor)
    return unflatten(document, tensors)
