"""The model that joined: every boundary finds it the same, and what nobody trains unchanged, or says what to do.

Parameters that begin as a copy of trained ones, and that nothing will train, are found at the join: they travel with
the buffers. Of all others, what is trained are the same tensors later, and what is frozen has the same values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.parameters import FrozenSpec, Schema, copy_tensors, frozen_digest, parameters_of
from decentral.parameters.schema import is_sharded, local_part

logger = logging.getLogger("decentral.training")

# ---- copies of what is trained ----

MOST_COPIED = 2**24  # values of copies that are shared without being named: 64 MB in each round


def find_copies(
    bare: nn.Module, parameters: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[frozenset[str], str]:
    """Return the parameters that begin as a copy of trained ones and that nothing will train, and the modules around
    them, for people.
    """
    nothing = frozenset[str](), ""
    if any(is_sharded(parameter) for parameter in parameters.values()):
        return nothing
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    wanted = [p for p in parameters.values() if p.requires_grad and (id(p) in stepped or not stepped)]
    found = copy_tensors(bare, {id(parameter) for parameter in wanted})
    names = frozenset(name for inside in found.values() for name in inside)
    if sum(parameters[name].numel() for name in names) > MOST_COPIED:
        return nothing
    return names, ", ".join(found) if names else ""


# ---- the same model at every boundary ----
#
# Values at boundaries count, and not what a loop does with them inside a step: it may freeze a discriminator for a
# moment, or perturb and restore. So a parameter is called frozen once no step since the last boundary found it thawed.
# A frozen base may have billions of values, which are hashed once, at the join. At a boundary so many tensors are
# looked at in turn, at values spread over each, and as many whose version counter rose (an EMA by ``.data`` raises
# none). They may be off by rounding: adapters are merged into a base and taken out again to evaluate or generate.

LOOKED_AT = 256  # frozen tensors at one boundary
SAMPLED = 64  # values of each
ROUNDING = 16.0  # times the dtype's epsilon by which a tensor may be off, in norm


@dataclass(slots=True)
class _Frozen:
    """A frozen parameter, as it was at the join."""

    spec: FrozenSpec
    sample: Tensor | None  # None: of a dtype that torch only stores
    sums: Tensor | None  # of all values, in stretches; None: the sample has all of them, or they have no sum
    version: int
    hashed: bool = False  # since the join


class Joined:
    """The model as it joined, to compare with what the loop has made of it since."""

    def __init__(self, bare: nn.Module, schema: Schema, *, sharded: bool, copies: str = "") -> None:
        """``sharded``: this process has parts of the frozen parameters; ``copies``: modules, see `find_copies`."""
        self._bare, self._copies = bare, copies
        parameters = parameters_of(bare)
        trained = [spec.name for fragment in schema.fragments for spec in fragment.parameters]
        self._trained = {name: parameters[name] for name in trained}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._trained.items()}
        self._known, self._sharded, self._parameters = set(parameters), sharded, parameters
        # What has adapters on it is peft's, which merges them in and takes them out, not to the bit.
        # The parts of a quantised one (`parts_of`) are no parameters, and nobody moves them.
        watched = [s for s in schema.frozen if ".base_layer." not in s.name and s.name in parameters]
        held = [parameters[spec.name] for spec in watched]
        sums = [None if sharded else _sums(parameter) for parameter in held]
        each = zip(watched, held, sums, strict=True)
        self._frozen = [_Frozen(spec, _sample(p), sum_, _version(p)) for spec, p, sum_ in each]
        self._turn = 0
        self._still: set[str] = set()  # trained ones, frozen at the last boundary and at every step since
        self._has_warned = False
        self._untrained = frozenset[str]()

    def expect_frozen(self, names: Iterable[str]) -> None:
        """Know of parameters that stay frozen, because this peer trains a part: nobody is warned of them."""
        self._untrained = frozenset(names)

    def warn_of_copies(self) -> None:
        """Say which modules were taken for copies."""
        if self._copies:
            logger.warning(
                "%s begins as a copy of what is trained, and no gradient trains it: it is shared and kept as buffers "
                "are, as by join(moved=[...]); moved=[] does not",
                self._copies,
                extra={"plain": True},
            )

    def before_step(self) -> None:
        """Note which parameters are thawed, as some optimizer is about to step."""
        if self._still:
            self._still = {name for name in self._still if not self._trained[name].requires_grad}

    def check(self) -> None:
        """Raise ConfigError for another tensor in the place of one, or another value of a frozen one. Warn once of
        trained ones that stay frozen.
        """
        now = parameters_of(self._bare)
        self._check_tensors(now)
        self._check_values(now)
        frozen = {name for name in self._trained if not now[name].requires_grad} - self._untrained
        if not self._has_warned and (names := sorted(frozen & self._still)):
            self._has_warned = True
            logger.warning(
                "%s, and %d more, took part in training at the join and stayed frozen for a round: their values are "
                "shared as before, so what other peers learn of them still comes in",
                names[0],
                len(names) - 1,
            )
        self._still = frozen

    def check_tensors(self) -> None:
        """Raise ConfigError where other tensors are trained than at the join; between two boundaries, too."""
        self._check_tensors(parameters_of(self._bare))

    def _check_tensors(self, now: Mapping[str, Tensor]) -> None:
        added = [name for name, parameter in now.items() if parameter.requires_grad and name not in self._known]
        for name, then in self._trained.items():
            found = now.get(name)
            if found is not None and tuple(found.shape) == self._shapes[name] and (found is then or self._sharded):
                continue
            is_what = f"is another tensor of shape {tuple(found.shape)}" if found is not None else "is gone"
            is_what += f" ({added[0]} came)" if found is None and added else ""
            raise ConfigError(
                f"{name} had shape {self._shapes[name]} at the join, and {is_what}: what it learns would reach nobody; "
                "resize, replace or prune parameters before join(), make the optimizer after that, and begin a new run"
            )
        if added:
            raise ConfigError(
                f"{added[0]}, of shape {tuple(now[added[0]].shape)}, came into the model after the join: what it "
                "learns would reach nobody; build the whole model before join(), and begin a new run"
            )

    def _check_values(self, now: Mapping[str, Tensor]) -> None:
        here = self._parameters if self._sharded else now
        risen = [one for one in self._frozen if _version(here.get(one.spec.name)) != one.version]
        begin, self._turn = self._turn, (self._turn + LOOKED_AT) % max(1, len(self._frozen))
        looked_at = risen[:LOOKED_AT] + (self._frozen[begin:] + self._frozen[:begin])[:LOOKED_AT]
        changed = [one.spec.name for one in looked_at if self._is_changed(one, here.get(one.spec.name))]
        thawed = [name for name in changed if now[name].requires_grad and now[name] is self._parameters[name]]
        if thawed:
            raise ConfigError(
                f"{thawed[0]} was not trained when this peer joined and is now: what it learns would reach nobody; "
                "thaw it before join(), and begin a new run: inside the block it may be frozen for as long as you like"
            )
        if changed:
            more = len(set(changed)) - 1
            raise ConfigError(
                f"{changed[0]}{f' (and {more} more)' if more else ''} is frozen, so that all peers have the same, but "
                "changed after the join: newcomers, a restart and the export would have what it was; where the loop "
                "moves it (an EMA, a teacher, a target network, a codebook), begin a new run with "
                f'join(..., moved=["{self._around(changed[0])}"]), and it is shared and kept as buffers are'
            )

    def _is_changed(self, frozen: _Frozen, now: Tensor | None) -> bool:
        """Tell by the sample; where that says nothing and the counter rose, by all values, once."""
        if now is None:
            return False  # a teacher that is not needed any more
        if not self._sharded and tuple(now.shape) != frozen.spec.shape:
            return True
        sample, has_risen = _sample(now), _version(now) != frozen.version
        frozen.version = _version(now)
        if sample is not None and frozen.sample is not None and not torch.equal(sample, frozen.sample):
            return _is_off(sample, frozen.sample)
        is_all_seen = sample is not None and now.numel() <= SAMPLED
        if not has_risen or frozen.hashed or self._sharded or is_all_seen:
            return False
        frozen.hashed = True
        is_another = frozen_digest(now) != frozen.spec.digest
        return is_another and (frozen.sums is None or _is_off(_sums(now), frozen.sums, of=now))

    def _around(self, name: str) -> str:
        """Return the largest module around a parameter in which nothing is trained; else its own name."""
        words = name.split(".")
        arounds = (".".join(words[:count]) for count in range(1, len(words) + 1))
        return next(one for one in arounds if not any(t.startswith(f"{one}.") for t in self._trained))


def _version(tensor: Tensor | None) -> int:
    """Count the changes of its values in place, by whomever; -1 where nobody counts."""
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> Tensor | None:
    """Return some values spread over the tensor; None where it has none, or torch cannot take them."""
    held = local_part(tensor)
    if held.device.type == "meta" or not held.numel():
        return None
    try:
        at = torch.arange(0, held.numel(), -(-held.numel() // SAMPLED), dtype=torch.int64, device=held.device)
        return torch.take(held, at).cpu()
    except (RuntimeError, TypeError):  # NotImplementedError is one: a quantised one, or float8
        return None


def _sums(tensor: Tensor) -> Tensor | None:
    """Sum as many stretches as a sample has values; None where there is no such sum.

    Sums move as far as the values do, in norm, and by rounding hardly.
    """
    if tensor.numel() <= SAMPLED or not tensor.is_floating_point():
        return None
    flat, exact = tensor.detach().reshape(-1), torch.float32 if tensor.device.type == "mps" else torch.float64
    whole = flat.numel() // SAMPLED * SAMPLED
    try:
        rows, rest = flat[:whole].view(SAMPLED, -1), flat[whole:]
        return torch.cat([rows.sum(1, dtype=exact), rest.sum(dtype=exact).view(1)]).cpu()
    except (RuntimeError, TypeError):  # as above
        return None


def _is_off(now: Tensor | None, then: Tensor, of: Tensor | None = None) -> bool:
    """Tell whether values, or sums ``of`` values, are farther apart than rounding brings them."""
    if now is None or now.dtype != then.dtype or not now.is_floating_point():
        return True
    distance = torch.linalg.vector_norm(now.double() - then.double())
    whole = then if of is None else of.detach()
    long = torch.linalg.vector_norm(whole.float() if whole.dtype != torch.float64 else whole).cpu()
    return bool(distance > ROUNDING * torch.finfo(whole.dtype).eps * long)
