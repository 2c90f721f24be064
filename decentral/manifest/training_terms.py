"""What each peer trains: the model, the text, and the inner steps between two outer ones."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from decentral.manifest.inner_optimizers import INNER_OPTIMIZERS, OWN_KEYS, InnerName, inner_optimizers_with
from decentral.manifest.table import Table
from decentral.manifest.values import (
    Count,
    Decay,
    Label,
    NotNegative,
    PartShare,
    Positive,
    Seconds,
    Size,
    Steps,
    TextDigest,
)

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
    def routed(self) -> int:
        """Experts that a token goes to, of a mixture."""
        return self.experts_per_token or EXPERTS_PER_TOKEN


class Data(Table):
    """What is trained on. The text itself never leaves a peer."""

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

    @model_validator(mode="after")
    def _names_a_text(self) -> Data:
        if self.digest is not None and self.corpus == "stdlib":
            raise ValueError('data.digest is of text that a label names; with corpus = "stdlib" leave it out')
        return self


class Inner(Table):
    """What a peer does alone between two outer steps."""

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
        own = INNER_OPTIMIZERS[self.named].keys
        for key in OWN_KEYS:
            if getattr(self, key) is not None and key not in own:
                others = ", ".join(inner_optimizers_with(key))
                has = ", ".join(own) or "none of its own"
                raise ValueError(f"{key} is a key of {others}, and {self.named} has {has}; leave it out")
        return self

    @model_validator(mode="after")
    def _has_gradients(self) -> Inner:
        if INNER_OPTIMIZERS[self.named].forward_only and (self.weight_decay or self.clip is not None):
            raise ValueError(
                f"weight_decay = {self.weight_decay:g} and clip = {self.clip or 'unset'}: {self.named} goes forward "
                "only, so that there is no gradient to clip or to add to; set weight_decay = 0, and leave clip out"
            )
        return self

    @model_validator(mode="after")
    def _has_a_clock(self) -> Inner:
        if (self.pace == "clock") != (self.seconds is not None):
            raise ValueError('inner.pace = "clock" and inner.seconds go together; set both, or leave both out')
        return self

    @property
    def named(self) -> InnerName:
        """The optimizer's name, when it is unset, too."""
        return self.optimizer or "adamw"

    def own(self) -> dict[str, float]:
        """The keys that are the optimizer's own: what is set, else what it has then."""
        given = {key: getattr(self, key) for key in OWN_KEYS if getattr(self, key) is not None}
        return {**INNER_OPTIMIZERS[self.named].keys, **given}
