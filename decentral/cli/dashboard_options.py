"""Whether the page's extra is installed, said before anything else is done."""

from __future__ import annotations

import importlib.util

from decentral.errors import UsageError

_PACKAGES = ("starlette", "uvicorn")


def check_dashboard_there() -> None:
    """UsageError where a package is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the page needs {' and '.join(missing)}; pip install 'decentral[dashboard]'")
