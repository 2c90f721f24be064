"""The common ground of the callbacks for other people's training loops: keywords of ``join``, a peer entered and
left, data in an order of its own, the processes of a peer.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from accelerate import PartialState
from accelerate.data_loader import SeedableRandomSampler
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import device, nn
from torch.utils.data import IterableDataset

from decentral.errors import ConfigError, DecentralError
from decentral.manifest import Manifest
from decentral.observe.screen import invite_for, say
from decentral.peer import Peer
from decentral.peer.settings import OPTIONS, PeerOptions
from decentral.tasks.batches import ShardedStream, ShardPlace, is_stream

# ---- options of join ----
#
# An integration passes them on to ``decentral.join``.

Run = str | Path | Manifest | None
T = TypeVar("T")


def options_to_keep(given: PeerOptions) -> dict[str, Any]:  # Any: JSON
    """Return the options that JSON can keep and anybody may read: no token, nothing that lives in this process only."""
    plain = {name: os.fspath(value) if isinstance(value, Path) else value for name, value in given.items()}
    return {name: value for name, value in plain.items() if not OPTIONS[name].is_secret and _is_json(value)}


def read_back(kept: Mapping[str, Any]) -> PeerOptions:
    """Return what was written down, as options again."""
    return cast(PeerOptions, dict(kept))


def _is_json(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(one) for one in value)
    return value is None or isinstance(value, str | int | float | bool)


# ---- a peer, entered and left ----
#
# A framework opens its ``with`` block in one of its calls and closes it in another.
#
# Frameworks that are ended by an error or by Ctrl-C do not always make the second call. The process then still leaves
# the run when it ends, as the block would have: with what the last step left, and a goodbye.


class Entered:
    """A holder of one peer at a time, entered and left."""

    def __init__(self) -> None:
        self._peer: Peer | None = None

    @property
    def peer(self) -> Peer | None:
        """The peer that takes part now."""
        return self._peer

    def enter(self, peer: Peer) -> None:
        """Begin to take part, and say how others join. One that was not left before ends: its loop was cut off."""
        if self._peer is not None:
            self.leave(DecentralError("another training loop begins"))
        peer.__enter__()
        self._peer = peer
        atexit.register(self._at_exit)
        if peer.invite and not peer.settings.options["quiet"]:
            line = invite_for(sys.stderr, peer.invite)
            bare = "" if line == peer.invite else "  # without its token, as this may be a log: peer.invite has it"
            say(f"decentral: decentral join {line} --script {shlex.quote(sys.argv[0])}{bare}")

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run; ``error``: what ended the training loop, if it did not come to its own end."""
        peer, self._peer = self._peer, None
        atexit.unregister(self._at_exit)
        if peer is not None:
            peer.__exit__(None if error is None else type(error), error, None)

    def shard(self, dataset: Iterable[T]) -> IterableDataset[T]:
        """This peer's part of streamed data, made before there is a peer: of all until it has entered a run."""
        if not is_stream(dataset):
            raise ConfigError(
                f"DecentralCallback.shard: a {type(dataset).__name__} has indices, and the framework draws it in an "
                "order of this peer's own; give it the data set as it is, and here what can only be walked through"
            )
        return ShardedStream(dataset, lambda: ShardPlace() if self._peer is None else self._peer.shard_place)

    def _at_exit(self) -> None:
        """The process ends with a peer that nobody left: by what Python was told of last, or just so."""
        self.leave(getattr(sys, "last_value", None) or SystemExit())


def checkpoint_of(peer: Peer) -> dict[str, Any]:  # Any: JSON
    """Return what a framework's checkpoint remembers of the run: where it was, and no secret."""
    where = {"out": str(peer.out), "run_id": peer.manifest.digest.hex()}
    return {**where, "round": peer.round, "inner_steps": peer.inner_steps}


def check_goes_on(kept: Mapping[str, Any], peer: Peer, checkpoint: str) -> None:
    """ConfigError for a peer that would found a run anew of which the framework's ``checkpoint`` has rounds behind it.

    ``kept``: what that checkpoint remembers, empty for one of another training loop. The peer is not entered yet.
    """
    if not kept.get("round") or kept["run_id"] != peer.manifest.digest.hex() or peer.settings.invite is not None:
        return
    if not any((peer.out / "checkpoints").glob("*")):
        raise ConfigError(
            f"{checkpoint} was written after round {kept['round']} of this run, and {peer.out} holds no checkpoint of "
            f"the peer; pass out={kept['out']!r}, or join by an invite"
        )


# ---- an order of its own ----
#
# In which a framework's loader draws its data: another one on every peer, without a setting.
#
# Peers that hold the same data and leave the seed at its default would draw the same batches, and do the work of one.

_SEEDS = 2**62  # an epoch is added to the seed, which has to stay below 2**63


def draw_in_own_order(loader: object, seed: int) -> bool:
    """Shuffle by ``seed`` besides the seed that the loader has, which is the same on all processes of a peer.

    False where the loader draws otherwise: in the order of the data, by a stream, by a sampler of one's own.
    """
    sampler = loader
    while sampler is not None and not isinstance(sampler, SeedableRandomSampler):  # of processes, of batches, of items
        batches = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if batches is None else batches  # a stream's has no truth value
    if sampler is None:
        return False
    sampler.initial_seed = (sampler.initial_seed + seed) % _SEEDS
    return True


# ---- the processes of one peer ----
#
# Where a framework keeps its ``Accelerator`` to itself: what ``join`` asks of one.

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class World:
    """This process among those of its peer, as accelerate's shared state tells it.

    ``cpu``: of a framework that began the process group by itself, whether it computes on the processor; accelerate
    then has to be told.
    """

    def __init__(self, *, cpu: bool = False) -> None:
        self._state = PartialState(cpu=cpu)

    @property
    def is_main_process(self) -> bool:
        """True where it talks to the swarm."""
        return bool(self._state.is_main_process)

    @property
    def num_processes(self) -> int:
        """The number of processes of this peer."""
        return int(self._state.num_processes)

    @property
    def device(self) -> device:
        """The device of this process."""
        return device(self._state.device)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The model without what accelerate put around it."""
        bare: nn.Module = extract_model_from_parallel(model)
        return bare


def check_whole(caller: str) -> None:
    """ConfigError where each process holds a part of the parameters only: nobody has what a round needs."""
    kind = AcceleratorState().distributed_type if is_initialized() else DistributedType.NO
    if kind in _SHARDED:
        raise ConfigError(
            f"{caller}: {kind.value} shards the model over this peer's processes, and a round needs all of it; "
            "launch plain DDP instead (accelerate launch --multi_gpu)"
        )
