"""What a manifest may say of feedback."""

import pytest

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest


@pytest.mark.parametrize("spelling", ["none", "ef(beta=0.5)", "dgc(momentum=0.9)"])
def test_mechanisms_of_the_sender_alone_fit_a_swarm(spelling: str) -> None:
    check_methods(preset_manifest("sparseloco", compressor={"feedback": spelling}))


@pytest.mark.parametrize("spelling", ["ef21", "econtrol(eta=0.001)"])
def test_mechanisms_whose_receivers_remember_fit_a_gather(spelling: str) -> None:
    check_methods(preset_manifest("sparseloco", compressor={"feedback": spelling}))


@pytest.mark.parametrize("spelling", ["ef21", "econtrol(eta=0.001)"])
@pytest.mark.parametrize(
    ("preset", "kind", "why"),
    [("diloco", "reduce", "slices of ranges that move"), ("noloco", "pair", "partners change from step to step")],
)
def test_mechanisms_whose_receivers_remember_are_refused_where_not_all_get_all(
    spelling: str, preset: str, kind: str, why: str
) -> None:
    manifest = preset_manifest(preset, compressor={"feedback": spelling}, exchange={"kind": kind})
    with pytest.raises(ConfigError, match=rf"does not fit exchange.kind = .{kind}.*{why}.*use .gather."):
        check_methods(manifest)


def test_an_unknown_mechanism_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean ef21"):
        check_methods(preset_manifest("sparseloco", compressor={"feedback": "ef22"}))
