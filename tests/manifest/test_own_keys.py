"""Keys of [outer] that are a method's own: a stranger's file has any, of any type and size."""

from __future__ import annotations

import pytest

from decentral.errors import ConfigError
from decentral.manifest import Manifest, differences, parse_manifest, summary
from decentral.manifest.presets import check_methods

TEXT = """
[run]
name = "small"
[outer]
method = "delayed_nesterov"
{line}
[compressor]
chain = "int8(block=4096)"
[exchange]
kind = "gather"
"""


def manifest_with(line: str) -> Manifest:
    return parse_manifest(TEXT.format(line=line))


@pytest.mark.parametrize("value", ["[1]", "{a = 1}", "true", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z"])
def test_what_is_no_number_and_no_word_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^manifest: outer: delay of a method must be a number or a word$"):
        manifest_with(f"delay = {value}")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
def test_a_number_that_is_not_finite_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^manifest: outer: grace must be finite$"):
        manifest_with(f"grace = {value}")


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 10**400], ids=["2**53+1", "-2**53-1", "10**400"])
def test_a_whole_number_that_no_float_has_is_refused(value: int) -> None:
    """It ended in a traceback, or had the digest of another."""
    with pytest.raises(ConfigError, match=r"^manifest: outer: delay must be between -2\*\*53 and 2\*\*53$"):
        manifest_with(f"delay = {value}")


@pytest.mark.parametrize(
    "key", ["own_keys", "model_fields", "model_extra", "hyper", "copy", "json", "schema", "digest"]
)
def test_a_key_that_is_called_as_something_in_every_table_is_a_key_like_any_other(key: str) -> None:
    """Its value was looked up as that: a digest of a Python method ended in a traceback."""
    found, plain = manifest_with(f"{key} = 3"), manifest_with("")
    assert found.digest != plain.digest
    assert parse_manifest(found.to_toml()) == found
    assert differences(found, plain) == [f"outer.{key}: 3.0 here, unset there"]
    assert f"{key} 3" in summary(found)
    with pytest.raises(ConfigError, match=f"^unknown key outer.{key}; "):
        check_methods(found)
