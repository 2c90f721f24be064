"""Tensors -> parts -> tensors. Pure, a file for each kind of method; error feedback is a wrapper.

The seam is `Compressor`. `parse_compressor` reads a spelling from a manifest, ``topk(k=64, chunk=4096) >> signmag2``;
``str(compressor)`` writes the canonical one, with every argument. Grammar: METHOD or METHOD >> METHOD, a method being
``name`` or ``name(key=number, ...)``. Feedbacks are spelled alike: ``ef(beta=0.95)``.

Other packages add methods through the entry point groups "decentral.compressors" and "decentral.feedback"
(`decentral.plugins`).
"""

from types import MappingProxyType

from decentral.compressors.base import (
    Compressor,
    Decoded,
    Method,
    Nothing,
    PartSpec,
    Payload,
    Sparsifier,
    Uncompressed,
    accumulate,
    bits_per_value,
)
from decentral.compressors.blockwise import E3M0, FP8, NF4, Int4, Int8, Sign
from decentral.compressors.chain import Chain
from decentral.compressors.codebooks import Codebook8, SparseLoCo2
from decentral.compressors.dct import DCT
from decentral.compressors.ef21 import EF21, EControl
from decentral.compressors.feedback import ErrorFeedback, Feedback, NoFeedback
from decentral.compressors.half import BFloat16, Float16
from decentral.compressors.lowrank import LowRank
from decentral.compressors.randk import RandK
from decentral.compressors.signmag2 import SignMag2
from decentral.compressors.stochastic import QSGD, Natural
from decentral.compressors.threshold import DGC, Threshold
from decentral.compressors.topk import TopK
from decentral.errors import ConfigError
from decentral.plugins import Plugins, make

__all__ = [
    "DCT",
    "E3M0",
    "FP8",
    "NF4",
    "QSGD",
    "BFloat16",
    "Chain",
    "Codebook8",
    "Compressor",
    "Decoded",
    "Feedback",
    "Float16",
    "Int4",
    "Int8",
    "LowRank",
    "Natural",
    "Nothing",
    "PartSpec",
    "Payload",
    "RandK",
    "Sign",
    "SignMag2",
    "SparseLoCo2",
    "Sparsifier",
    "Threshold",
    "TopK",
    "Uncompressed",
    "accumulate",
    "bring",
    "describe_compressors",
    "describe_feedback",
    "parse_compressor",
    "parse_feedback",
]

_OURS = (
    Uncompressed,
    Float16,
    BFloat16,
    Int8,
    Int4,
    E3M0,
    FP8,
    NF4,
    Sign,
    Codebook8,
    SparseLoCo2,
    QSGD,
    Natural,
    TopK,
    RandK,
    Threshold,
    DCT,
    LowRank,
    SignMag2,
)
_METHODS = Plugins("compressor", "decentral.compressors", MappingProxyType({m.name: m for m in _OURS}))
_FEEDBACKS = Plugins(
    "feedback",
    "decentral.feedback",
    MappingProxyType({m.name: m for m in (NoFeedback, ErrorFeedback, EF21, EControl, DGC)}),
)
_LONGEST_SPELLING = 256
_EARLIER = MappingProxyType({"powersgd": "lowrank"})  # names in manifests of runs that go on: a digest covers the text


def parse_compressor(spelling: str) -> Compressor:
    """Return the compressor of a spelling; ConfigError, with the nearest name, when there is none."""
    if len(spelling) > _LONGEST_SPELLING:
        raise ConfigError(f"compressor of {len(spelling)} characters: at most {_LONGEST_SPELLING} are read")
    words = spelling.split(">>")
    if len(words) > 2:
        raise ConfigError(f'compressor "{spelling}": one >> joins two methods; write sparsifier >> quantiser')
    methods = [_check(make(_by_todays_name(word), _METHODS, "int8(block=4096)"), word) for word in words]
    return methods[0] if len(methods) == 1 else Chain(methods[0], methods[1])  # type: ignore[arg-type]  # it checks


def bring(compressor: type[Method]) -> None:
    """Know a compressor by its name in this process, as if a package added it. ConfigError where it cannot be."""
    _METHODS.bring(compressor)


def _check(made: object, spelling: str) -> Method:
    """Return what an entry point gave; ConfigError unless it has the contract of compressors."""
    if not isinstance(made, Method):
        raise ConfigError(
            f"compressor {spelling.strip()}: its class must derive from decentral.compressors.base.Method, "
            "with compress_one and decompress_one; ask its author"
        )
    return made


def _by_todays_name(word: str) -> str:
    name, bracket, arguments = word.partition("(")
    return _EARLIER.get(name.strip(), name) + bracket + arguments


def describe_compressors() -> list[dict[str, object]]:
    """List the methods: name, spelling, layout in words, bits_per_value at most, biased, bound, state, source."""
    return [_describe(name, _check(_METHODS.make(name, {}), name)) for name in _METHODS.names()]


def _describe(name: str, compressor: Method) -> dict[str, object]:
    about = compressor.about
    return {
        "name": name,
        "spelling": str(compressor),
        "layout": about.layout,
        "bits_per_value": round(bits_per_value(compressor), 5),
        "biased": about.biased,
        "bound": about.bound,
        "state": about.state,
        "source": about.source,
    }


def parse_feedback(spelling: str) -> Feedback:
    """Return the mechanism of a spelling; ConfigError, with the nearest name, when there is none."""
    if len(spelling) > _LONGEST_SPELLING:
        raise ConfigError(f"feedback of {len(spelling)} characters: at most {_LONGEST_SPELLING} are read")
    made: Feedback = make(spelling, _FEEDBACKS, "ef(beta=0.95)")
    return made


def describe_feedback() -> list[dict[str, object]]:
    """Return a row per mechanism: name, spelling with defaults, what is kept on each side (layout), source."""
    rows: list[dict[str, object]] = []
    for name in _FEEDBACKS.names():
        made: Feedback = _FEEDBACKS.make(name, {})
        source = getattr(getattr(made, "about", None), "source", "not described")
        rows.append(
            {
                "name": name,
                "spelling": str(made),
                "sender keeps": ", ".join(made.sender) or "nothing",
                "receivers keep": ", ".join(f"{name} of each sender" for name in made.receiver) or "nothing",
                "source": source,
            }
        )
    return rows
