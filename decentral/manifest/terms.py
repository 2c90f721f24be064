"""A manifest's terms: one frozen table per subject, one description per key, which is also its comment in the file.

The digest covers the values only, not their order, their comments or the spelling of numbers; it is the run's id,
so peers that agree on the id agree on everything here. Crosses the wire as its TOML text, about 3 kB.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from decentral.manifest.table import (
    Count,
    Decay,
    Label,
    NotNegative,
    PartShare,
    Positive,
    Salt,
    Seconds,
    Size,
    Spelling,
    Steps,
    Table,
    TextDigest,
    Url,
    Word,
    canonical,
    check_model,
    check_tables,
    explain,
    to_toml,
)

__all__ = [
    "EXPERTS_PER_TOKEN",
    "INNER_OPTIMIZERS",
    "OWN_KEYS",
    "Combining",
    "Compression",
    "Data",
    "Digest",
    "Exchange",
    "Inner",
    "InnerName",
    "KnownOptimizer",
    "Manifest",
    "Model",
    "Outer",
    "Redundancy",
    "Run",
    "SharedText",
    "Swarm",
    "inner_optimizers_with",
]

# ---- inner optimizers that can be named ----
#
# Each has keys of [inner] of its own, with values when they are unset. Plain values without torch;
# `decentral.training.inner` builds the optimizers.

InnerName = Literal["adamw", "muon", "adopt", "sgd", "schedule_free", "gpa", "qh_adopt", "spsa"]

_BOTH = ("exp_avg", "exp_avg_sq")
_ADAM = {"beta1": 0.9, "beta2": 0.95}  # 0.95: some hundred steps are too few for 0.999
OWN_KEYS: Final = ("momentum", "beta1", "beta2", "mixing", "averaging")  # of [inner], that only some of them have


@dataclass(frozen=True, slots=True)
class KnownOptimizer:
    """An inner optimizer that a manifest can name."""

    title: str  # as people write it; in small letters and without "-" and "_" a part of its class's name
    keys: Mapping[str, float]  # its keys of [inner] beside those that all have, and their values when unset
    moments: tuple[str, ...] = ()  # which it has of every parameter, by torch's names
    forward_only: bool = False  # it steps by losses, and neither clip nor weight decay is anything to it
    averages: bool = False  # what it learns is an average of where it trains


INNER_OPTIMIZERS: Final[Mapping[InnerName, KnownOptimizer]] = {
    "adamw": KnownOptimizer("AdamW", _ADAM, _BOTH),
    "muon": KnownOptimizer("Muon", {"momentum": 0.9, **_ADAM}),  # the betas are of the AdamW beside it
    "adopt": KnownOptimizer("ADOPT", {"beta1": 0.9, "beta2": 0.9999}, _BOTH),
    "sgd": KnownOptimizer("SGD", {"momentum": 0.9}),
    "schedule_free": KnownOptimizer("Schedule-Free", {"beta2": 0.95, "mixing": 0.9}, ("exp_avg_sq",), averages=True),
    "gpa": KnownOptimizer("GPA", {**_ADAM, "mixing": 0.7, "averaging": 0.9967}, _BOTH, averages=True),
    "spsa": KnownOptimizer("SPSA", {}, forward_only=True),
    "qh_adopt": KnownOptimizer("QH-ADOPT", {"beta1": 0.99, "beta2": 0.9999, "mixing": 0.7}, _BOTH),
}


def inner_optimizers_with(key: str) -> list[str]:
    """Return the inner optimizers that have this key of [inner]."""
    return [name for name, known in INNER_OPTIMIZERS.items() if key in known.keys]


# ---- what each peer trains ----
#
# The model, the text, and the inner steps between two outer ones.

EXPERTS_PER_TOKEN = 2  # of a mixture: as SPES and Mixtral have it


class Model(Table):
    """The model that every peer builds."""

    task: Literal["causal-lm", "custom"] = Field(
        default="causal-lm", description="causal-lm: a small Llama over bytes; custom: your own script's model"
    )
    hidden: Size = Field(default=128, description="width; a multiple of 2 * heads")
    layers: Annotated[int, Field(ge=1, le=4096)] = Field(default=3, description="transformer blocks")
    heads: Annotated[int, Field(ge=1, le=4096)] = Field(default=4, description="attention heads per block")
    context: Size = Field(default=128, description="tokens that the model sees at once")
    experts: Annotated[int, Field(ge=2, le=1024)] | None = Field(
        default=None, description="per block, of a mixture as OLMoE is one; unset: one MLP, as Llama's", examples=[8]
    )
    experts_per_token: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        default=None, description=f"experts that a token goes to; unset: {EXPERTS_PER_TOKEN}", examples=[1]
    )
    tied: bool | None = Field(
        default=None,
        description="head and embedding are one matrix; unset: true; false where stages are to be on several machines",
        examples=[False],
    )
    buffers: Literal["average", "first", "own"] | None = Field(
        default=None,
        description="BatchNorm's means and the like: average of contributors, first's, or own; unset: average",
        examples=["own"],
    )

    @model_validator(mode="after")
    def _fits(self) -> Model:
        if self.task == "causal-lm" and self.hidden % (2 * self.heads):
            raise ValueError(f"hidden = {self.hidden} must be a multiple of 2 * heads = {2 * self.heads}")
        if self.experts_per_token is not None and self.experts_per_token > (self.experts or 0):
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} needs as many experts; set model.experts, too"
            )
        return self

    @property
    def experts_of_a_token(self) -> int:
        """Experts that a token goes to, of a mixture."""
        return self.experts_per_token or EXPERTS_PER_TOKEN


LEAST_TEXT_NBYTES = 64 * 2**10  # less is no corpus: windows would repeat within one round
MOST_TEXT_NBYTES = 2**30  # a corpus lives in memory


class SharedText(Table):
    """The text of all peers, for who joins without it."""

    nbytes: Annotated[int, Field(ge=LEAST_TEXT_NBYTES, le=MOST_TEXT_NBYTES)] = Field(
        description="of the whole text; it comes to who joins without it: decentral init --share-text"
    )
    chunks: TextDigest | None = Field(
        default=None,
        description="digest of the list of its chunks, which peers give; unset: they give none",
        examples=["0" * 64],
    )
    url: Url | None = Field(
        default=None, description="where that text is, too; unset: nowhere", examples=["https://example.org/text"]
    )

    @model_validator(mode="after")
    def _comes_from_somewhere(self) -> SharedText:
        if self.chunks is None and self.url is None:
            raise ValueError("neither chunks nor url is set, so nobody gives the text; set one, or leave the table out")
        return self


class Data(Table):
    """The training data. The text itself leaves a peer only where ``shared`` says so."""

    corpus: Label = Field(
        default="stdlib", description="stdlib: the standard library's source; else a label for your --data"
    )
    digest: TextDigest | None = Field(
        default=None,
        description="of that text, the same for all: decentral init --data PATH; unset: each peer brings its own",
        examples=["0" * 64],
    )
    batch_size: Size = Field(default=4, description="sequences per inner step and peer")
    held_out: Annotated[float, Field(gt=0, le=0.5)] = Field(default=0.05, description="fraction kept for evaluation")
    shared: SharedText | None = Field(
        default=None,
        description="bytes of that text, which comes to who joins without it; unset: each peer has a copy",
        examples=[{"nbytes": 10_000_000}],
    )

    @model_validator(mode="after")
    def _names_a_text(self) -> Data:
        if self.digest is not None and self.corpus == "stdlib":
            raise ValueError('data.digest is of text that a label names; with corpus = "stdlib" leave it out')
        if self.shared is not None and self.digest is None:
            raise ValueError("data.shared is of the text that data.digest names; set that, too")
        return self


class Inner(Table):
    """The training of a peer alone, between two outer steps."""

    steps: Count = Field(default=30, description="H: inner steps between two outer steps of the same parameters")
    learning_rate: Positive = Field(default=1e-3, description="after warm-up")
    weight_decay: NotNegative = Field(default=0.1, description="decoupled, as AdamW does; sgd adds it to the gradient")
    warmup: Steps = Field(default=20, description="inner steps over which the learning rate rises")
    clip: Positive | None = Field(default=None, description="largest gradient norm; unset: no clipping", examples=[1.0])
    optimizer: InnerName | None = Field(
        default=None,
        description=f"{', '.join(INNER_OPTIMIZERS)}; unset: adamw",
        examples=["muon"],
    )
    momentum: Decay | None = Field(default=None, description="of muon and sgd; unset: 0.9", examples=[0.9])
    beta1: Decay | None = Field(
        default=None, description="decay of the first moment; unset: 0.9, of qh_adopt 0.99", examples=[0.9]
    )
    beta2: Decay | None = Field(
        default=None,
        description="decay of the second moment; unset: 0.95, of adopt and qh_adopt 0.9999",
        examples=[0.95],
    )
    mixing: PartShare | None = Field(
        default=None,
        description="share of the average in what trains: schedule_free 0.9, gpa 0.7; qh_adopt: of its momentum",
        examples=[0.7],
    )
    averaging: Decay | None = Field(
        default=None,
        description="of gpa: what its average keeps in a step; 0.9 ** (1 / H) is DiLoCo's",
        examples=[0.9967],
    )
    pace: Literal["equal", "speed", "clock"] | None = Field(
        default=None,
        description="equal: H steps of every peer; speed: fewer of a slow one; clock: by seconds; unset: equal",
        examples=["speed"],
    )
    seconds: Seconds | None = Field(
        default=None,
        description='with pace = "clock": of training before each contribution, of H / fragments steps at most',
        examples=[60.0],
    )

    @model_validator(mode="after")
    def _keys_of_its_optimizer(self) -> Inner:
        own = INNER_OPTIMIZERS[self.optimizer_name].keys
        for key in OWN_KEYS:
            if getattr(self, key) is not None and key not in own:
                others = ", ".join(inner_optimizers_with(key))
                has = ", ".join(own) or "none of its own"
                raise ValueError(f"{key} is a key of {others}, and {self.optimizer_name} has {has}; leave it out")
        return self

    @model_validator(mode="after")
    def _has_gradients(self) -> Inner:
        if INNER_OPTIMIZERS[self.optimizer_name].forward_only and (self.weight_decay or self.clip is not None):
            raise ValueError(
                f"weight_decay = {self.weight_decay:g} and clip = {self.clip or 'unset'}: {self.optimizer_name} goes "
                "forward only, so that there is no gradient to clip or to add to; set weight_decay = 0, and leave clip "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _has_a_clock(self) -> Inner:
        if (self.pace == "clock") != (self.seconds is not None):
            raise ValueError('inner.pace = "clock" and inner.seconds go together; set both, or leave both out')
        return self

    @property
    def optimizer_name(self) -> InnerName:
        """The optimizer's name, when it is unset, too."""
        return self.optimizer or "adamw"

    def own(self) -> dict[str, float]:
        """The keys that are the optimizer's own: what is set, else what it has then."""
        given = {key: getattr(self, key) for key in OWN_KEYS if getattr(self, key) is not None}
        return {**INNER_OPTIMIZERS[self.optimizer_name].keys, **given}


# ---- what all peers do together ----
#
# The outer method, how contributions become one vector, how they are packed and sent.

LARGEST_WHOLE = 2**53  # whole numbers of a method: they are hashed as floats, and beyond it two would have one digest


def _check_own(keys: Mapping[str, Any]) -> None:  # Any: values of every TOML type
    """ValueError for keys beside the declared ones that no method may have."""
    for key, value in keys.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", key):
            raise ValueError("a key of a method is written in small letters, digits and _, 32 at most")
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"{key} of a method must be a number or a word")
        if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9_(),.=>+ -]{1,256}", value):
            raise ValueError(f"{key} has characters that do not belong, or too many")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} must be finite")
        if isinstance(value, int) and abs(value) > LARGEST_WHOLE:
            raise ValueError(f"{key} must be between -2**53 and 2**53")


class Combining(Table):
    """How contributions become one vector. Keys beside these are the rule's own: decentral aggregation lists them."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    rule: Word = Field(description="decentral aggregation lists them; mean is what happens without this table")

    @model_validator(mode="after")
    def _plain_keys(self) -> Combining:
        _check_own(self.own)
        return self

    def own_keys(self) -> list[tuple[str, Any, str]]:  # Any: a rule's defaults
        """The keys of the rule that it names."""
        from decentral.optimizers import describe_aggregation_keys  # torch

        return describe_aggregation_keys(self.rule)

    @property
    def own(self) -> dict[str, Any]:  # Any: numbers and words
        """The rule's keys that are set."""
        return dict(self.model_extra or {})


class Outer(Table):
    """The step of all peers together. Keys beside these are the method's own: decentral optimizers lists them."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    method: Word = Field(description="outer optimizer: decentral optimizers lists them")
    learning_rate: Positive | None = Field(
        default=None,
        description="unset: the method's own; diloco's then follows the number of contributors",
        examples=[0.7],
    )
    fragments: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="slices of the model that take turns"
    )
    layout: Literal["strided", "stages"] | None = Field(
        default=None,
        description="stages: fragments are neighbouring blocks, one of which a small machine can train; unset: strided",
        examples=["stages"],
    )
    skip: PartShare | None = Field(
        default=None,
        description="largest share of the fragments that machines which share a replica do without; unset: none",
        examples=[0.25],
    )
    overlap: Steps = Field(
        default=0, description="tau: inner steps that go on while a round is in flight; 0 waits for it"
    )

    weighting: Literal["equal", "tokens"] | None = Field(
        default=None,
        description="equal, or by tokens (1/16 to 4 times the typical); unset: equal, or tokens with a pace of speed",
        examples=["tokens"],
    )
    norm_clip: Literal["none", "median"] | None = Field(
        default=None,
        description="median: contributions longer than the typical one are shortened to it; unset: none",
        examples=["median"],
    )

    aggregation: Combining | None = Field(
        default=None,
        description="how contributions become one vector: decentral aggregation lists the rules; unset: mean",
        examples=[{"rule": "rfa"}],
    )

    @model_validator(mode="before")
    @classmethod
    def _without_unset(cls, given: Any) -> Any:  # Any: what a file or a caller has, checked after this
        """A key of a method that is None is one that is left out."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or key in cls.model_fields}

    @model_validator(mode="after")
    def _skips_stages(self) -> Outer:
        if self.skip is not None and self.layout != "stages":
            raise ValueError(f'skip = {self.skip:g} is of layout = "stages"; set that, too, or leave skip out')
        return self

    @model_validator(mode="after")
    def _plain_keys(self) -> Outer:
        _check_own(self.model_extra or {})
        return self

    def own_keys(self) -> list[tuple[str, Any, str]]:  # Any: a method's defaults
        """The keys of the method that it names."""
        from decentral.optimizers import describe_keys  # torch

        return describe_keys(self.method)

    @property
    def most_skipped(self) -> int:
        """Fragments that a replica of several machines may do without."""
        return int((self.skip or 0.0) * self.fragments + 1e-9)  # 0.29 of 100 is 29

    @property
    def fragment_layout(self) -> Literal["strided", "stages"]:
        """How blocks are dealt out to fragments, when it is unset, too."""
        return self.layout or "strided"

    @property
    def hyper(self) -> dict[str, float | str]:
        """The hyper-parameters that are set, by the names that ``make_outer`` knows."""
        rate = {} if self.learning_rate is None else {"lr": self.learning_rate}
        return rate | dict(self.model_extra or {})


class Compression(Table):
    """How a contribution is packed."""

    chain: Spelling = Field(description="decentral compressors lists them; sparsifier >> quantiser")
    feedback: Spelling = Field(
        default="none",
        description='what becomes of what compression left unsent: "ef(beta=0.95)", "none"; in a gather "ef21"',
    )


class Exchange(Table):
    """The way of frames between peers."""

    kind: Literal["gather", "reduce", "pair"] = Field(
        description="gather: all to all, sparse methods; reduce: by parts, dense ones; pair: gossip"
    )


# ---- who is there, and who keeps for whom ----
#
# [swarm.redundancy] has peers keep for each other, in memory, what each of them alone has.

Keepers = Annotated[int, Field(ge=1, le=32)]


class Redundancy(Table):
    """Pieces, in others' memory, of the state that a peer's disk alone has: its inner optimizer's above all."""

    keepers: Keepers = Field(default=3, description="other members that keep a piece each of a peer's own state")
    needed: Keepers = Field(default=2, description="pieces that give it back; each is that part of the state long")
    seconds: Seconds = Field(default=600.0, description="between two of a peer's states that are given, at least")
    megabytes: Count = Field(default=1024, description="of memory for the pieces of all others, on each peer, at most")

    @model_validator(mode="after")
    def _can_be_joined(self) -> Redundancy:
        if self.needed > self.keepers:
            raise ValueError(
                f"needed = {self.needed} is above keepers = {self.keepers}: that many pieces there never are; lower it"
            )
        return self

    @property
    def nbytes(self) -> int:
        """Memory for the pieces of all others."""
        return 1_000_000 * self.megabytes


class Swarm(Table):
    """The members, and how long they wait for each other."""

    min_peers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="members below which nothing is committed"
    )
    deadline_floor: Seconds = Field(default=2.0, description="seconds: least slack that late peers get")
    deadline_ceiling: Seconds = Field(
        default=60.0, description="seconds: longest wait for offers after a round's first"
    )
    lease: Seconds = Field(
        default=15.0, description="seconds without a sign of life after which a peer is not waited for"
    )
    shrink_after: Seconds = Field(
        default=60.0, description="seconds after which missing peers no longer count for majorities"
    )
    redundancy: Redundancy | None = Field(
        default=None,
        description="so many members keep, in memory, what a peer that loses its disk needs; unset: nobody does",
        examples=[{"keepers": 3}],
    )

    @model_validator(mode="after")
    def _check_order(self) -> Swarm:
        if self.deadline_floor > self.deadline_ceiling:
            raise ValueError(f"deadline_floor = {self.deadline_floor} is above deadline_ceiling; lower it")
        if self.lease > self.shrink_after:
            raise ValueError(f"lease = {self.lease} is above shrink_after = {self.shrink_after}; raise shrink_after")
        return self


# ---- the whole manifest ----

Digest = bytes

_DOMAIN = b"decentral manifest 1\n"


class Run(Table):
    """The run itself."""

    name: Word = Field(description="what people call the run: letters, digits, . _ -")
    salt: Salt = Field(default="", description="any word: two runs with equal terms and other salts are two runs")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="of the first weights and the data order"
    )
    rounds: Count = Field(default=100, description="outer steps after which the run is done")
    minutes: Positive | None = Field(
        default=None,
        description="the run also ends at the first commit after this time; unset: no limit",
        examples=[60.0],
    )


_BUILT_IN_ONLY = (
    *(("model", key) for key in ("hidden", "layers", "heads", "context", "experts", "experts_per_token")),
    *(("data", key) for key in ("batch_size", "held_out", "shared")),
    *(("inner", key) for key in ("warmup", "clip")),
)


class Manifest(Table):
    """Everything that the peers of a run agree on. Frozen: ``changed`` makes another one."""

    run: Run
    model: Model = Model()
    data: Data = Data()
    inner: Inner = Inner()
    outer: Outer
    compressor: Compression
    exchange: Exchange
    swarm: Swarm = Swarm()
    _salt_is_drawn: bool = PrivateAttr(default=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, given: object, check: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Say what is wrong in a `Manifest(...)` as `of` says it."""
        try:
            return check(given)
        except ValidationError as error:
            raise explain(error, cls, (info.context or {}).get("source", "Manifest")) from None

    @model_validator(mode="after")
    def _every_fragment_in_time(self) -> Manifest:
        steps, fragments = self.inner.steps, self.outer.fragments
        if steps % fragments:
            above = steps + fragments - steps % fragments
            nearest = f"{above - fragments} or {above}" if steps > fragments else f"{above}"
            raise ValueError(
                f"inner.steps = {steps} is no multiple of outer.fragments = {fragments}, so no fragment would be "
                f"synchronised every {steps} steps; take {nearest}"
            )
        return self

    @model_validator(mode="after")
    def _overlap_ends(self) -> Manifest:
        between = self.inner.steps // self.outer.fragments
        if self.outer.overlap >= between:
            raise ValueError(
                f"outer.overlap = {self.outer.overlap} must be below inner.steps / outer.fragments = {between}, "
                "or a fragment's next round begins before its last one is applied"
            )
        return self

    @property
    def weighting(self) -> Literal["equal", "tokens"]:
        """The measure of a contribution's weight. Unset, all inner steps count alike where a pace lets peers make
        other numbers of them: by tokens where contributions are as long as if of H steps, and equally where they are
        not.
        """
        return self.outer.weighting or ("tokens" if self.inner.pace == "speed" else "equal")

    @cached_property
    def digest(self) -> Digest:
        """blake2b-256 of the values: the run's id."""
        return hashlib.blake2b(_DOMAIN + canonical(self), digest_size=32).digest()

    def __copy__(self) -> Self:
        """Return a copy that has no digest yet: ``model_copy`` gives it other values."""
        copied = super().__copy__()
        copied.__dict__.pop("digest", None)
        return copied

    @property
    def run_id(self) -> str:
        """The digest's first 12 hexadecimal digits, for people."""
        return self.digest.hex()[:12]

    @classmethod
    def of(cls, tables: Mapping[str, object], source: str) -> Manifest:
        """The manifest of these tables. Raises ConfigError naming ``source`` and the first thing that is wrong."""
        return check_model(cls, tables, source)

    def to_toml(self) -> str:
        """The manifest as a commented file; reading it back gives the same digest."""
        idle = {(table, key) for table, key in self._of_no_script if not self._is_set(table, key)}
        return to_toml(self, without=idle)

    @property
    def idle(self) -> list[str]:
        """Keys that are set and do nothing, as they are for the built-in model and the task is a script's own."""
        return [f"{table}.{key}" for table, key in self._of_no_script if self._is_set(table, key)]

    @property
    def _of_no_script(self) -> Sequence[tuple[str, str]]:
        return _BUILT_IN_ONLY if self.model.task == "custom" else ()

    def _is_set(self, table: str, key: str) -> bool:
        part = getattr(self, table)
        return bool(getattr(part, key) != type(part).model_fields[key].default)

    def changed(self, **tables: Mapping[str, object]) -> Manifest:
        """A checked copy: ``manifest.changed(run={"rounds": 10})``. Raises ConfigError."""
        given = self.model_dump()
        check_tables({f"manifest.changed: {name}": keys for name, keys in tables.items()}, "the table's keys")
        for table, keys in tables.items():
            given[table] = given.get(table, {}) | dict(keys)
        made = self.of(given, "changed manifest")
        made._salt_is_drawn = self._salt_is_drawn and "salt" not in tables.get("run", {})
        return made

    def with_salt(self, salt: str) -> Manifest:
        """A copy with a ``salt`` that nobody gave: a folder goes on with the run that it has by these terms."""
        made = self.changed(run={"salt": salt})
        made._salt_is_drawn = True
        return made

    def goes_on(self, kept: Manifest) -> bool:
        """Tell whether these terms mean the run that is ``kept`` already: all is equal, but a salt that was drawn."""
        return self._salt_is_drawn and kept.changed(run={"salt": self.run.salt}) == self
