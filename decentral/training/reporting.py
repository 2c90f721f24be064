"""Reports of one peer: events of its rounds, times and bytes for its status, losses around commits."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from decentral.consensus.chain import contributions, moves_anchor
from decentral.errors import ConfigError
from decentral.observe.diagnostics import Look
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import GossipStep
from decentral.rounds.local_state import CommittedUpdate, Decision
from decentral.training.live_model import LiveModel
from decentral.training.progress import Away
from decentral.wire.keys import PeerId, peer_name

logger = logging.getLogger("decentral.peer")

SEEN = 100  # rounds over which "you contributed to 40 of the last 41" is counted
USUAL = 9  # rounds whose median says how long one takes: a stall or two do not move it
RATE_WINDOW = 10.0  # s over which bytes per second are measured
NOTABLE_WAIT = 2.0  # s; every round without overlap waits for its commit, and only a longer wait is worth a word
_UNUSUAL = 1.5  # times as long as others are


class Counters:
    """Times and outcomes of one peer's rounds, as a status wants them.

    Written by the training thread, read by the thread that makes a status.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._outcomes: deque[tuple[int, bool]] = deque(maxlen=SEEN)  # outer steps made, whether it contributed
        self.num_outcomes = self.num_contributed = 0  # ever
        self.traffic = TrafficRates(clock)
        self._waiting = False
        self.wanted_members = 0  # for whom training waits before it begins; 0: it does not
        self.loss: float | None = None
        self.held_out_loss: float | None = None
        self._round_began = self._contributed_at = self._clock()
        self._rounds: deque[tuple[float, bool]] = deque(maxlen=USUAL)  # s of each, and whether it was not missed
        self.waited = 0.0  # s the training thread stood still for the swarm
        self._wait_began = 0.0
        self._waited_before = 0.0  # until the last round ended
        self._waits: deque[float] = deque(maxlen=USUAL)  # s of each of the last rounds
        self._held = 0.0  # s since then in which parameters were copied out and in
        self.held_seconds: deque[float] = deque(maxlen=USUAL)  # of the last rounds
        self.taking_seconds: deque[float] = deque(maxlen=USUAL)  # in which training stood still for a checkpoint

    # ---- written ----

    def waits(self, waiting: bool) -> None:
        """Count time in which the training thread waits for the swarm."""
        now = self._clock()
        if waiting:
            self._wait_began = now
        elif self._waiting:
            self.waited += now - self._wait_began
        self._waiting = waiting

    def holds(self, seconds: float) -> None:
        """Count seconds in which parameters were copied."""
        self._held += seconds

    def waits_for(self, members: int) -> None:
        """Note for how many members training waits before it begins; 0: it does not, or not any more.

        The first round begins when the wait is over: who waited for a friend for hours has "4.2 h left" else.
        """
        if self.wanted_members and not members:
            self._round_began = self._contributed_at = self._clock()
        self.wanted_members = members

    def branch_left(self, outer_step: int) -> None:
        """Forget rounds after so many outer steps, of a branch that is left: what this peer contributed to them is in
        no round of the run, and sent again.
        """
        stay = [one for one in list(self._outcomes) if one[0] <= outer_step]
        self.num_contributed -= sum(self.outcomes) - sum(contributed for _, contributed in stay)
        self._outcomes = deque(stay, maxlen=SEEN)  # another one, as another thread may be reading

    def count_round(self, contributed: bool | None, step: int) -> None:
        """Count a round; ``contributed`` is None where nobody contributes, so that this peer missed nothing."""
        now = self._clock()
        if contributed is not None:
            self._outcomes.append((step, contributed))
            self._contributed_at = now if contributed else self._contributed_at
            self.num_outcomes += 1
            self.num_contributed += contributed
        self._rounds.append((now - self._round_began, contributed is not False))
        self._round_began = now

    def skip_round(self) -> None:
        """Time the next round: one that ends while this peer is away is none that it missed, but no round hangs."""
        self._round_began = self._clock()

    def measure_round(self) -> dict[str, object]:
        """Measure seconds since the last round ended here, those in which training stood still, and those in which it
        was held to copy parameters.
        """
        now = self._clock()
        waited = self.waited + (now - self._wait_began if self._waiting else 0.0)
        since, self._waited_before = waited - self._waited_before, waited
        self._waits.append(since)
        self.held_seconds.append(self._held)
        held, self._held = self._held, 0.0
        return {"seconds": round(now - self._round_began, 3), "waited": round(since, 3), "held": round(held, 4)}

    # ---- read ----

    @property
    def stands_still(self) -> bool:
        """True while the training thread waits for the swarm."""
        return self._waiting

    @property
    def stands_long(self) -> bool:
        """True when it has waited for longer than rounds do here."""
        return self._waiting and is_long(self._clock() - self._wait_began, list(self._waits))

    @property
    def outcomes(self) -> list[bool]:
        """Contributions of this peer to the last rounds of the run, at most ``SEEN``: true or false for each."""
        return [contributed for _, contributed in list(self._outcomes)]

    @property
    def usual_round(self) -> float | None:
        """Seconds that a round usually takes; None before the first has ended. Of those that this peer did not miss, as
        those that it catches up with pass in no time; of all, if it missed all.
        """
        return usual(self._own_seconds or [one for one, _ in list(self._rounds)])

    @property
    def own_round(self) -> float | None:
        """The same, of those that it did not miss alone; None while there is none."""
        return usual(self._own_seconds)

    @property
    def _own_seconds(self) -> list[float]:
        return [seconds for seconds, own in list(self._rounds) if own]

    @property
    def since_round(self) -> float:
        """Seconds since a round ended here, or since this peer began."""
        return self._clock() - self._round_began

    @property
    def since_contributed(self) -> float:
        """Seconds since one ended to which this peer contributed, or since it began."""
        return self._clock() - self._contributed_at

    @property
    def next_round_in(self) -> float | None:
        """Seconds until the next round ends, should it take as long as the last one."""
        seconds = self._own_seconds
        return max(0.0, self._round_began + seconds[-1] - self._clock()) if seconds else None


def is_long(wait: float, waits: Sequence[float]) -> bool:
    """Tell whether a wait is worth a word, by those of the last rounds: who waits in every round for slower peers is
    well, and what is said of it must not change twice in each. The longest of them is no measure: it may be a stall.
    """
    longest = sorted(waits)[-2:]
    return wait > max(NOTABLE_WAIT, _UNUSUAL * longest[0] if longest else 0.0)


def usual(seconds: Iterable[float]) -> float | None:
    """Return the median; None where there is none. Another thread may note the next one meanwhile."""
    held = list(seconds)
    return statistics.median(held) if held else None


class TrafficRates:
    """Bytes of one peer per second, and per round, by what it had exchanged whenever a status was made."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int, int]] = deque(maxlen=256)  # s; bytes sent and received until then
        self._sent_after: deque[tuple[int, int]] = deque([(0, 0)])  # so many rounds: bytes sent until then

    def per_round(self, sent: int, rounds: int) -> float:
        """Return the mean of bytes sent over the last ``SEEN`` rounds, of so many ever; to be asked every few."""
        marks = self._sent_after
        if marks[-1][0] != rounds:
            marks.append((rounds, sent))
        while len(marks) > 2 and rounds - marks[1][0] >= SEEN:
            marks.popleft()
        (first, sent_then), (last, sent_last) = marks[0], marks[-1]
        return (sent_last - sent_then) / max(1, last - first)

    def per_second(self, sent: int, received: int) -> tuple[float, float]:
        """Return those sent and received lately; ``sent`` and ``received``: until now."""
        now = self._clock()
        self._seen.append((now, sent, received))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_WINDOW:
            self._seen.popleft()
        then, sent_then, received_then = self._seen[0]
        elapsed = max(now - then, 1e-3)
        return (sent - sent_then) / elapsed, (received - received_then) / elapsed


class Reporter:
    """Reports what happens to one peer at its step boundaries, as events and log lines, and counts it."""

    def __init__(
        self, emit: Callable[[str, dict[str, object]], None], me: PeerId, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._emit, self._me = emit, me
        self.counters = Counters(clock)
        self.part: range | None = None  # fragments that this peer trains; None: all

    def metrics(self, logged: Mapping[str, float | Tensor], inner_step: int) -> None:
        """Report values that the loop logged after so many inner steps. ConfigError for anything but one number."""
        values = {name: _number(f"peer.log({name}=...)", one) for name, one in logged.items()}
        counters = self.counters
        counters.loss = values.get("loss", counters.loss)
        counters.held_out_loss = values.get("held_out_loss", counters.held_out_loss)
        self._emit("metrics", {"inner_step": inner_step, **values})

    def forget_held_out(self) -> None:
        """Forget the held-out loss, as nobody measures it any more: it would stay on the screen to the end."""
        self.counters.held_out_loss = None

    def waits(self, waiting: bool) -> None:
        """Count time in which the training thread waits for the swarm."""
        self.counters.waits(waiting)

    def holds(self, seconds: float) -> None:
        """Count seconds in which parameters were copied."""
        self.counters.holds(seconds)

    def branch_left(self, outer_step: int) -> None:
        """Forget rounds of a branch that is left, see `Counters.branch_left`."""
        self.counters.branch_left(outer_step)

    def round_ended(self, update: CommittedUpdate, *, of_pairs: bool = False) -> None:
        """Report a commit that was merged, or changed the membership; ``of_pairs``: of a gossip run, so no round."""
        record = update.record
        assert record is not None
        fields: dict[str, object] = {
            "round": record.round,
            "epoch": record.epoch,
            "outer_step": record.outer_step + moves_anchor(record),
            "fragment": record.fragment,
            "contributors": [peer_name(ref.peer) for ref in contributions(record)],
            "members": [peer_name(peer) for peer in record.next_members],
            "contributed": update.contribution is not None,
            "final": record.final,
            "record": record.hash.hex(),
            "anchor": update.anchor.hex(),
        }
        if moves_anchor(record):
            fields |= {**({} if of_pairs else self.counters.measure_round()), **_fields_of(update.decision)}
        self._emit("commit" if moves_anchor(record) else "membership", fields)
        was_there = self._me in record.members or update.contribution is not None
        if not moves_anchor(record) or of_pairs:
            return
        if was_there:
            is_of_others = self.part is not None and record.fragment not in self.part
            contributed = None if is_of_others else update.contribution is not None
            self.counters.count_round(contributed, record.outer_step + 1)
        else:
            self.counters.skip_round()

    def away(self, away: Away) -> None:
        """Report progress of an absence that is dropped, in part or whole."""
        self._emit("away", away.fields())
        logger.warning("%s", away.sentence())

    def starts_over(self, why: str) -> None:
        """Report that the live model, which held NaN, goes on from the anchor, as the user wants."""
        self._emit("restarted", {"why": why})
        logger.warning("the live model is put back to the anchor, and training goes on: %s", why.partition("; ")[0])

    def swap_begins(self, mine: Contribution) -> None:
        """Count time in which the training thread waits for a gossip step."""
        self.counters.waits(True)

    def swap_ended(self, outcome: GossipStep) -> None:
        """Report a gossip step."""
        self.counters.waits(False)
        partner = None if outcome.partner is None else peer_name(outcome.partner)
        fields: dict[str, object] = {
            "step": outcome.step,
            "partner": partner,
            "disagreement": outcome.disagreement,
            **self.counters.measure_round(),
        }
        self._emit("pair", fields)
        self.counters.count_round(outcome.partner is not None if outcome.matched else None, outcome.step + 1)


def _fields_of(decision: Decision | None) -> dict[str, object]:
    """Describe how the commit came about, where this peer was there."""
    if decision is None:
        return {}
    sending = None if decision.sending is None else round(decision.sending, 3)
    who = {"leader": peer_name(decision.leader), "ballot": decision.ballot, "votes": decision.votes}
    return {**who, "sending": sending, "applying": round(decision.applying, 3)}


def _number(name: str, given: Any) -> float:  # Any: a number, or what is none
    try:
        return float(given.detach()) if isinstance(given, Tensor) else float(given)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(given.shape)}" if isinstance(given, Tensor) else ""
        what = f"{type(given).__name__}{shape}"
        raise ConfigError(f"{name}: a {what} is not one number; pass its mean, say") from None


# ---- losses around commits ----
#
# Held out by the user's own function, or as far as the losses tell that the loop logs.

SHARE = 0.03  # of the time that evaluations may take
FEWEST = 4  # logged losses of a round
MOST = 10_000  # of them
AT_FIRST = 4  # looks that need not be paid for, finished or not: a run of minutes has its first ones


class Looks:
    """Evaluates the live model before and after commits, as often as that takes little time.

    Nothing of training is changed by it: modes, buffers and random generators are as before.
    """

    def __init__(
        self,
        evaluate: Callable[[], object],
        model: LiveModel,
        report: Callable[[Look], None],
        clock: Callable[[], float] = time.monotonic,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """``failed``: called when no more looks come."""
        self._evaluate, self._model, self._report, self._clock, self._failed = evaluate, model, report, clock, failed
        self._began, self._spent, self._begun, self._fails = clock(), 0.0, 0, False
        self._has_warned_of_nan = False
        self._start: float | None = None  # loss where the inner steps of this round began; None: it is not known
        self._before: float | None = None

    def begin(self) -> None:
        """Evaluate where training begins. ConfigError where that cannot be done: nothing is trained yet."""
        try:
            self._start_at(self._loss())
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"join(evaluate=...) raised {type(error).__name__}: {_in_a_line(error)}; it takes no argument, and "
                "returns the held-out loss of the model that it was joined with"
            ) from error

    def heard(self, loss: float | None) -> None:
        """Pass over what the loop logs."""

    def before(self) -> None:
        """Evaluate where the inner steps have ended."""
        self._before = None if self._start is None else self._try()

    def after(self, outer_step: int) -> None:
        """Evaluate the commit's outcome, which is where the next inner steps begin."""
        start, before = self._start, self._before
        self._start = self._before = None
        if start is None or before is None:
            if self._is_due:
                self._start_at(self._try())
        elif (after := self._try()) is not None:
            self._report(Look(outer_step, start, before, after))
            if self._is_due:
                self._start_at(after)

    def give_up(self) -> None:
        """Give up the look that was begun."""
        self._start = self._before = None

    def _start_at(self, loss: float | None) -> None:
        self._start = loss
        self._begun += 1

    @property
    def _is_due(self) -> bool:
        """Tell whether a look more is worth its time."""
        paid_for = self._spent <= SHARE * (self._clock() - self._began)
        return not self._fails and (paid_for or self._begun < AT_FIRST)

    def _try(self) -> float | None:
        """Evaluate; None where there is no loss, and from the first error on: a run does not end for a diagnosis."""
        if self._fails:
            return None
        try:
            return self._loss()
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            self._fails = True
            self._failed()
            logger.warning(
                "join(evaluate=...) raised %s: %s; it is not called any more, and training goes on without it",
                type(error).__name__, _in_a_line(error),
            )  # fmt: skip
            return None

    def _loss(self) -> float | None:
        began = self._clock()
        try:
            with self._model.evaluating():
                found = self._evaluate()
            loss = _number("join(evaluate=...)", found)
        finally:
            self._spent += self._clock() - began
        if not math.isfinite(loss) and not self._has_warned_of_nan:
            self._has_warned_of_nan = True
            logger.warning("join(evaluate=...) gave %s, which is passed over; look at the data that it evaluates", loss)
        return loss if math.isfinite(loss) else None


class LoggedLooks:
    """Takes the losses of inner steps, that the loop logs, for those of a look: the first of a round and the last.

    They are of another batch at every step, and of the data that is trained on: this tells less than an evaluation.
    """

    def __init__(self, report: Callable[[Look], None]) -> None:
        self._report = report
        self._losses: list[float] = []  # since the last commit
        self._last: tuple[int, float, float] | None = None  # outer steps with the last commit, losses before it

    def begin(self) -> None:
        """Evaluate nothing."""

    def heard(self, loss: float | None) -> None:
        """Keep a loss that the loop logged."""
        if len(self._losses) == MOST:  # no round comes, as in a pause
            self.give_up()
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)

    def before(self) -> None:
        """Ask nothing: the losses are there."""

    def after(self, outer_step: int) -> None:
        """Make a look of this round's losses and the last one's.

        The first is left out: a loop that logs after its step logs the last of the round before.
        """
        heard, self._losses = self._losses[1:], []
        if len(heard) < FEWEST:
            self._last = None
            return
        count = -(-len(heard) // 4)
        start, end = (statistics.fmean(some) for some in (heard[:count], heard[-count:]))
        if self._last is not None:
            self._report(Look(*self._last, start))
        self._last = outer_step, start, end

    def give_up(self) -> None:
        """Forget what was heard before the move."""
        self._losses, self._last = [], None


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
