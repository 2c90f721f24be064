"""The laboratory: methods side by side on many replicas in one process, by the real codecs, methods and schedules.

``study(...).run()`` is the Python of ``decentral lab``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decentral.lab.call import study

__all__ = ["study"]

if not TYPE_CHECKING:  # a type checker would take every misspelt name for it

    def __getattr__(name: str) -> object:  # PEP 562
        """Import the one public name when it is first used: a command asks for help without torch."""
        if name not in __all__:
            raise AttributeError(f"module 'decentral.lab' has no attribute {name!r}")
        from decentral.lab import call

        return call.study
