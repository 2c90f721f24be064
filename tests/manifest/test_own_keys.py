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


NO_VALUES = {  # of what a table holds, and why it is no value of a key
    "delay of a method must be a number or a word": [
        *("[1]", "{a = 1}", "true", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z"),
    ],
    "delay must be finite": ["nan", "inf", "-inf", "1e400"],
    # it ended in a traceback, or had the digest of another
    r"delay must be between -2\*\*53 and 2\*\*53": [str(2**53 + 1), str(-(2**53) - 1), str(10**400)],
}


@pytest.mark.parametrize("why", NO_VALUES)
def test_what_is_no_word_and_no_number_that_a_float_has_is_refused(why: str) -> None:
    for value in NO_VALUES[why]:
        with pytest.raises(ConfigError, match=f"^manifest: outer: {why}$"):
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
