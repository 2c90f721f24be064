"""py-libp2p's protobuf messages in a pool of their own, so that hivemind's may live in the same process.

Both bring ``crypto.proto`` with the same names in it, and protobuf's one pool of a process takes each name once: who
is imported second fails with "duplicate symbol 'crypto.pb.KeyType'". This has to run before libp2p is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from google.protobuf.descriptor_pool import DescriptorPool

_SHARED, _OWN = b"_descriptor_pool.Default()", b"_descriptor_pool"  # in code that protoc generates


class _Loader(SourceFileLoader):
    """Has the module find ``pool`` where it would ask for the shared one."""

    def __init__(self, name: str, path: str, pool: DescriptorPool) -> None:
        super().__init__(name, path)
        self._pool = pool

    def get_code(self, fullname: str) -> CodeType:
        """Always from the source: what is cached on the disk asks for the shared one."""
        source = self.get_data(self.path).replace(_SHARED, _OWN)
        return self.source_to_code(source.replace(b"from google.protobuf import descriptor_pool as", b"#"), self.path)

    def exec_module(self, module: ModuleType) -> None:
        """With the pool under the name that the generated code uses."""
        vars(module)["_descriptor_pool"] = self._pool
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the generated modules of libp2p, and nothing else."""

    def __init__(self) -> None:
        self._pool = DescriptorPool()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """With a loader of ours."""
        if not (fullname.startswith("libp2p.") and fullname.endswith("_pb2")):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self._pool)
        return spec


def keep_apart() -> None:
    """From now on. Where libp2p was imported already its messages stay where they are. Twice is no error."""
    if "libp2p" not in sys.modules and not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
