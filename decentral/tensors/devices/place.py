"""Where a fragment that is copied out of the live model lies, and what is made of it before it is sent.

On the device that trains, if the model is on one CUDA device and the method's training side knows tensors of any
device: then the pseudo-gradient is made there, and only what the compressor leaves of it crosses to the processor. That
takes memory of the device: the local parameters, the change, what is owed before and after, and the anchor for as long
as the change is made, 4 bytes a parameter each. Where that is more than a quarter of the device's, the processor's is
taken. Anchors and outer states are on the processor in any case: their bits are the same on every peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from decentral.tensors.devices.transfer import PROCESSOR

__all__ = ["BYTES_A_PARAMETER", "place_of"]

BYTES_A_PARAMETER = 20
_MOST = 0.25  # of the device's memory


def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def place_of(parameters: Iterable[Tensor], memory: Callable[[torch.device], int] = _memory) -> torch.device:
    """Of a model whose trained parameters these are, each whole in this process; ``memory``: bytes of a device."""
    held = list(parameters)
    devices = {one.device for one in held}
    if len(devices) != 1:
        return PROCESSOR
    (device,) = devices
    numel = sum(one.numel() for one in held)
    return device if device.type == "cuda" and BYTES_A_PARAMETER * numel <= _MOST * memory(device) else PROCESSOR
