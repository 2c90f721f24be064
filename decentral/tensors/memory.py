"""Whether an error says that memory ran out, of the device or of the machine. Torch is not imported for it."""

from __future__ import annotations

import errno

__all__ = ["is_out_of_memory"]

_NO_MEMORY = (  # on Windows the allocator says "not enough memory" behind its name
    "DefaultCPUAllocator: ",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Of one machine alone. Torch has a class for CUDA's, known by its name so that it need not be imported; its
    allocator on the processor raises a plain RuntimeError, and so do other devices'.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # a process that cannot be forked, a file that cannot be mapped
    by_class = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return by_class or (isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY))
