"""What a manifest may not ask of an exchange, as it would lose progress without a word."""

import pytest

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest


def compressed(chain: str, feedback: str = "ef(beta=0.95)") -> dict[str, dict[str, str]]:
    return {"compressor": {"chain": chain, "feedback": feedback}}


@pytest.mark.parametrize("chain", ["none", "fp16", "bf16", "int8", "fp8", "codebook8", "qsgd(levels=127, block=64)"])
@pytest.mark.parametrize("feedback", ["none", "ef(beta=0.95)", "dgc(momentum=0.9)"])
def test_a_pair_takes_what_keeps_the_slow_weights(chain: str, feedback: str) -> None:
    check_methods(preset_manifest("noloco", **compressed(chain, feedback)))


@pytest.mark.parametrize(
    ("chain", "lost"),
    [
        ("topk(k=64, chunk=4096) >> signmag2", "94%"),
        ("randk", "99%"),
        ("sign", "60%"),
        ("lowrank", "99%"),
        ("e3m0", "19%"),
        ("int4", "13%"),
    ],
)
def test_a_pair_refuses_what_loses_the_slow_weights_and_names_what_does_not(chain: str, lost: str) -> None:
    with pytest.raises(ConfigError, match=rf'does not fit outer.method noloco: it would lose {lost}.*use one.*"fp16"'):
        check_methods(preset_manifest("noloco", **compressed(chain)))


def test_a_pair_refuses_weights_as_it_has_none() -> None:
    check_methods(preset_manifest("noloco", outer={"weighting": "equal"}))
    with pytest.raises(ConfigError, match=r'outer.weighting = "tokens" does not fit.*"pair".*or use "equal"'):
        check_methods(preset_manifest("noloco", outer={"weighting": "tokens"}))


def test_a_pair_refuses_overlap_as_it_waits() -> None:
    with pytest.raises(ConfigError, match=r'outer.overlap = 1 does not fit exchange.kind = "pair".*set it to 0'):
        check_methods(preset_manifest("noloco", outer={"overlap": 1}))


def test_a_reduce_refuses_low_rank_as_it_has_no_matrices() -> None:
    check_methods(preset_manifest("diloco", exchange={"kind": "gather"}, **compressed("lowrank")))
    with pytest.raises(ConfigError, match=r'"lowrank\(.*" does not fit exchange.kind = "reduce".*kind = "gather"'):
        check_methods(preset_manifest("diloco", outer={"norm_clip": None}, **compressed("lowrank")))


@pytest.mark.parametrize(
    "chain", ["topk(k=64, chunk=4096) >> signmag2", "sign", "dct(k=64, chunk=4096)", "int4", "randk"]
)
def test_a_reduce_takes_what_works_on_flat_values(chain: str) -> None:
    check_methods(preset_manifest("diloco", outer={"norm_clip": None}, **compressed(chain)))


def test_a_reduce_with_feedback_refuses_a_clip_which_would_take_what_owners_hand_on() -> None:
    clipped = {"outer": {"norm_clip": "median"}, "exchange": {"kind": "reduce"}}
    check_methods(preset_manifest("diloco", **clipped))
    with pytest.raises(ConfigError, match=r"norm_clip = .median. does not fit compressor.feedback in a reduce"):
        check_methods(preset_manifest("sparseloco", **clipped))


@pytest.mark.parametrize("feedback", ["ef(beta=0.95)", "dgc(momentum=0.9)"])
def test_a_pair_that_sends_parameters_alone_refuses_feedback_as_nothing_is_owed(feedback: str) -> None:
    check_methods(preset_manifest("gasloc", **compressed("int8", "none")))
    with pytest.raises(ConfigError, match=r'does not fit outer.method gasloc: it sends parameters.*use "none"'):
        check_methods(preset_manifest("gasloc", **compressed("int8", feedback)))


@pytest.mark.parametrize(("chain", "lost"), [("topk(k=64, chunk=4096)", "9\\d%"), ("sign", "60%")])
def test_a_pair_that_sends_parameters_alone_refuses_what_loses_them(chain: str, lost: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not fit outer.method gasloc: it would lose {lost}"):
        check_methods(preset_manifest("gasloc", **compressed(chain, "none")))


@pytest.mark.parametrize("method", ["des_loc", "mt_dao"])
@pytest.mark.parametrize("exchange", ["gather", "reduce"])
@pytest.mark.parametrize("chain", ["topk(k=64, chunk=4096) >> signmag2", "int8", "int4"])
def test_a_method_whose_states_have_a_compressor_of_their_own_takes_any_for_the_change(
    method: str, exchange: str, chain: str
) -> None:
    check_methods(preset_manifest(method, exchange={"kind": exchange}, **compressed(chain)))


@pytest.mark.parametrize("method", ["des_loc", "mt_dao"])
def test_a_compressor_of_states_that_loses_them_is_refused_by_name(method: str) -> None:
    check_methods(preset_manifest(method, outer={"moments": "int8"}))
    with pytest.raises(ConfigError, match=rf'compressor "int4" of exp_avg and exp_avg_sq does not fit.*{method}.*13%'):
        check_methods(preset_manifest(method, outer={"moments": "int4"}))
    with pytest.raises(ConfigError, match="bf15"):
        check_methods(preset_manifest(method, outer={"moments": "bf15"}))


def test_states_without_a_compressor_of_their_own_are_still_refused_what_loses_them() -> None:
    with pytest.raises(ConfigError, match=r"does not fit outer.method scaffold: it would lose"):
        check_methods(preset_manifest("scaffold", **compressed("sign")))
