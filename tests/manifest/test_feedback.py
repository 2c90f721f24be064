"""What a manifest may say of feedback."""

import pytest

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest


@pytest.mark.parametrize("spelling", ["none", "ef(beta=0.5)", "dgc(momentum=0.9)"])
def test_mechanisms_of_the_sender_alone_fit_a_swarm(spelling: str) -> None:
    check_methods(preset_manifest("sparseloco", compressor={"feedback": spelling}))


@pytest.mark.parametrize("spelling", ["ef21", "econtrol(eta=0.001)"])
def test_mechanisms_that_need_the_same_contributors_in_every_round_are_refused(spelling: str) -> None:
    with pytest.raises(ConfigError, match=r"snapshots do not carry that yet.*use \"ef\(beta=0.95\)\""):
        check_methods(preset_manifest("sparseloco", compressor={"feedback": spelling}))


def test_an_unknown_mechanism_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean ef21"):
        check_methods(preset_manifest("sparseloco", compressor={"feedback": "ef22"}))
