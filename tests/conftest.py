"""Tests that are coroutines run by themselves (tests/kit/scripts.py)."""

from tests.kit.scripts import pytest_pyfunc_call, virtual_time  # noqa: F401
