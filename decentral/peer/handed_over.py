"""Arguments that ``decentral join INVITE --script train.py`` hands to the script's own ``decentral.join``.

A script founds a run, or is told which one to join. The command line knows the invite, the folder and the limits of
this peer: it hands them over inside the process before it runs the script, and they stand above what the script says:

    decentral.join(None, model, optimizer)           # only ever joins what is handed over
    decentral.join("run.toml", model, optimizer)     # founds the run when nothing is

Set by the command line and nobody else; a library that is told by a hidden variable would be hard to reason about.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from decentral.plugins import nearest

P = ParamSpec("P")
T = TypeVar("T")

_handed_over: dict[str, Any] = {}  # arguments of join by their names; Any: as various as those are


@contextmanager
def handed_over(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Within the block every ``decentral.join`` of this process takes these ``arguments`` instead of its own."""
    _handed_over.update(arguments)
    try:
        yield
    finally:
        _handed_over.clear()


def takes_what_is_handed_over(join: Callable[P, T]) -> Callable[P, T]:
    """Have a function's arguments replaced by those that are handed over under their names."""
    signature = inspect.signature(join)

    @wraps(join)
    def with_those(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in signature.parameters:
                near = nearest(name, [known for known in signature.parameters if known[0] == name[0]])
                raise TypeError(f"{join.__name__}() has no argument {name}; {near}")
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(_handed_over)
        return join(*bound.args, **bound.kwargs)

    return with_those
