"""Train one model together over ordinary internet links.

    with decentral.join("run.toml", model, optimizer, accelerator=accelerator) as peer:
        while not peer.done:
            ...  # your loop, unchanged

Every public name is listed in ``__all__``; each is imported when it is first asked for, so that
``import decentral`` costs nothing and loads no torch.
"""

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decentral.compressors import Compressor, describe_compressors, parse_compressor
    from decentral.errors import (
        BaseMismatch,
        ConfigError,
        DataError,
        DecentralError,
        DeviceError,
        DiskError,
        InviteError,
        ManifestMismatch,
        NonFiniteError,
        NoPeersError,
        NotAdmitted,
        PayloadError,
        ProcessLost,
        RoundFailed,
        TransportError,
        UsageError,
        VersionError,
    )
    from decentral.lab.tuning import tune
    from decentral.manifest import Manifest, load_manifest, preset_manifest
    from decentral.observe.status import Status
    from decentral.optimizers import OuterMethod, describe_optimizers, make_outer
    from decentral.peer import Anchor, Following, Peer, fetch_manifest, follow, join
    from decentral.state.delta import apply_delta
    from decentral.training.clocks import RoundEnded, RunSchedule

    __version__: str

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a script that configures no logging reads nothing bare

__all__ = [
    "Anchor",
    "BaseMismatch",
    "Compressor",
    "ConfigError",
    "DataError",
    "DecentralError",
    "DeviceError",
    "DiskError",
    "Following",
    "InviteError",
    "Manifest",
    "ManifestMismatch",
    "NoPeersError",
    "NonFiniteError",
    "NotAdmitted",
    "OuterMethod",
    "PayloadError",
    "Peer",
    "ProcessLost",
    "RoundEnded",
    "RoundFailed",
    "RunSchedule",
    "Status",
    "TransportError",
    "UsageError",
    "VersionError",
    "__version__",
    "apply_delta",
    "describe_compressors",
    "describe_optimizers",
    "fetch_manifest",
    "follow",
    "join",
    "load_manifest",
    "make_outer",
    "parse_compressor",
    "preset_manifest",
    "tune",
]

_HOMES = {
    "decentral.peer": ("Anchor", "Following", "Peer", "fetch_manifest", "follow", "join"),
    "decentral.lab.tuning": ("tune",),
    "decentral.manifest": ("Manifest", "load_manifest", "preset_manifest"),
    "decentral.observe.status": ("Status",),
    "decentral.state.delta": ("apply_delta",),
    "decentral.training.clocks": ("RoundEnded", "RunSchedule"),
    "decentral.compressors": ("Compressor", "describe_compressors", "parse_compressor"),
    "decentral.optimizers": ("OuterMethod", "describe_optimizers", "make_outer"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> object:  # PEP 562
        """Import a public name when it is first used, and keep it."""
        if name not in __all__:
            raise AttributeError(f"module 'decentral' has no attribute {name!r}")
        if name == "__version__":
            value: object = _installed_version()
        else:
            value = getattr(import_module(_HOME.get(name, "decentral.errors")), name)
        globals()[name] = value
        return value


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 0.05 s: not for every start

    try:
        return version("decentral")
    except PackageNotFoundError:  # a checkout on the path that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    """Everything public, imported or not."""
    return sorted({*globals(), *__all__})
