"""The processes of one peer, where a framework keeps its ``Accelerator`` to itself: what ``join`` asks of one."""

from __future__ import annotations

from accelerate import PartialState
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType, extract_model_from_parallel
from torch import device, nn

from decentral.errors import ConfigError

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
        """Whether it talks to the swarm."""
        return bool(self._state.is_main_process)

    @property
    def num_processes(self) -> int:
        """Of this peer."""
        return int(self._state.num_processes)

    @property
    def device(self) -> device:
        """Of this process."""
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
