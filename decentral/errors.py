"""Every error that leaves the package, by what the reader must do about it.

DecentralError                          exit code
├── ConfigError          fix the call     10   a manifest, an argument, a spelling
│   ├── UsageError                         2   a command line that cannot be meant
│   │   ├── FolderInUse                    2   another process lives in the folder
│   │   └── InviteError                    2   an invite that is cut short or not ours
│   ├── ManifestMismatch                  11   peers that do not agree on the run or on the model
│   ├── NotAdmitted                       12   the run admits by token
│   ├── NoPeersError                      20   nobody there, and the caller asked to require peers
│   ├── VersionError                      21   this library or a peer's is too old
│   ├── DataError                         30   no corpus, one too small, or another than the run's
│   ├── DeviceError                       40   no such device, or out of its memory
│   ├── DiskError                         50   full, read-only, or every checkpoint damaged
│   └── NonFiniteError                    40   NaN or Inf where a tensor goes to the swarm
├── ProcessLost          start again     60   another process of this peer ended
├── PayloadError         drop the peer     1   bytes of a peer that break a rule
├── TransportError       go on             1   a stream or a daemon that failed
│   ├── ListenError                        1   the address cannot be listened on
│   ├── PeerUnreachable                    1   no path to that peer now
│   └── StreamClosed                       1   the other side ended early
├── BaseMismatch         ask for it all    1   a delta to a version that is not held
└── RoundFailed          go on             1   no commit; state is as before the round

Messages are one line: the call with its values; the rule; the way out.
"""

from __future__ import annotations

import errno

__all__ = [
    "BaseMismatch",
    "ConfigError",
    "DataError",
    "DecentralError",
    "DeviceError",
    "DiskError",
    "FolderInUse",
    "InviteError",
    "ListenError",
    "ManifestMismatch",
    "NoPeersError",
    "NonFiniteError",
    "NotAdmitted",
    "PayloadError",
    "PeerUnreachable",
    "ProcessLost",
    "RoundFailed",
    "StreamClosed",
    "TransportError",
    "UsageError",
    "VersionError",
]


class DecentralError(Exception):
    """Anything this package raises on purpose; ``exit_code`` is what a command ends with."""

    exit_code = 1


class ConfigError(DecentralError):
    """The call or the manifest cannot work as written; nothing was changed."""

    exit_code = 10


class UsageError(ConfigError):
    """The command line cannot be meant as written."""

    exit_code = 2


class FolderInUse(UsageError):
    """A peer of another process lives in the folder; nothing in it was touched."""


class InviteError(UsageError):
    """The invite is cut short, altered, or not one of ours."""


class ManifestMismatch(ConfigError):
    """Two peers do not mean the same run: their manifests or models differ."""

    exit_code = 11


class NotAdmitted(ConfigError):
    """The run admits by token, and this peer has none or another."""

    exit_code = 12


class NoPeersError(ConfigError):
    """Nobody was reachable and the caller asked to require peers."""

    exit_code = 20


class VersionError(ConfigError):
    """This library, or the peer's, is too old to take part."""

    exit_code = 21


class DataError(ConfigError):
    """The corpus is missing, unreadable, too small, no text, or another than the run's."""

    exit_code = 30


class DeviceError(ConfigError):
    """The device is not there or ran out of memory."""

    exit_code = 40


class NonFiniteError(DeviceError):
    """A tensor that was to be shared holds NaN or Inf."""


class DiskError(ConfigError):
    """The disk is full, read-only, or holds only damaged checkpoints."""

    exit_code = 50


class ProcessLost(DecentralError):
    """Another process of this peer has ended: all of them train as one, and end as one."""

    exit_code = 60


class PayloadError(DecentralError):
    """A peer's bytes break a rule: drop them and their sender; nothing was applied."""


class BaseMismatch(DecentralError):
    """A delta belongs to a version that is not held; nothing was applied, the full version helps."""


class TransportError(DecentralError):
    """A stream or a daemon failed; the round or the retry above decides what follows."""


class ListenError(TransportError):
    """The address cannot be listened on."""


class PeerUnreachable(TransportError):
    """There is no path to that peer now."""


class StreamClosed(TransportError):
    """The other side ended the stream before all bytes came."""


class RoundFailed(DecentralError):
    """No commit was reached; every tensor and every debt is as before the round."""


class GroupBroken(DecentralError):
    """The machines that were one replica are so no more; each of them looks for others."""


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain error of a task group: what a person should read. An exit goes before what it broke."""
    inner = next((one for one in group.exceptions if not isinstance(one, Exception)), group.exceptions[0])
    return first_of(inner) if isinstance(inner, BaseExceptionGroup) else inner


# ---- errors that say memory ran out ----
#
# Memory of the device, or of the machine. Torch is not imported to tell them.

_NO_MEMORY = (  # on Windows the allocator says "not enough memory" behind its name
    "DefaultCPUAllocator: ",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether this machine ran out of memory. Torch has a class for CUDA's error, known by its name so that it
    need not be imported; its allocator on the processor raises a plain RuntimeError, and so do other devices'.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # a process that cannot be forked, a file that cannot be mapped
    by_class = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return by_class or (isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY))
