"""Every attack on every aggregation rule, on SparseLoCo: one line of JSON for each cell that is finished.

    OMP_NUM_THREADS=1 nice -n 10 python experiments/attacks/table.py --seeds 5 --tax-seeds 10

Ten peers, three of them hostile; each seed draws the split of the digits, the start, the batches and who is hostile,
alike for all rules and attacks. A cell in the file is never run again; interrupt at will.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from decentral.optimizers import Aggregation, make_aggregation
from experiments.attacks.digits import LABELS, SHAPES, Digits, Trainers, first_model
from experiments.attacks.hostile import Attack, index_overlap, make_attack
from experiments.attacks.records import CELLS, NONE, Cell, append, finished
from experiments.attacks.swarm import Swarm, Terms

PEERS, HOSTILE, STEPS, BATCH = 10, 3, 10, 32
INNER_LR, OUTER_LR = 6e-3, 2.5
COMPRESSOR, FEEDBACK = "topk(k=64, chunk=4096) >> signmag2", "ef(beta=0.95)"  # the preset's; so is norm_clip
RULES = {
    "norm_clip": {},
    "mean": {},
    "nnm": {"f": HOSTILE},
    "arc": {"f": HOSTILE, "then": "nnm"},
    "multi_krum": {"f": HOSTILE},
    "krum": {"f": HOSTILE},
    "mda": {"f": HOSTILE},
    "caf": {"f": HOSTILE},
    "centered_clip": {},
    "rfa": {},
    "bucketing": {"f": 2, "size": 2},  # with f = 3 there are too few groups of two: the rule after it decides alone
    "flag": {},
    "trimmed_mean": {"f": HOSTILE},
    "median": {},
    "meamed": {"f": HOSTILE},
}
ATTACKS = (
    "optimised_alie", "optimised_ipm", "sign_flip", "scale(factor=100)", "label_flip", "alie", "ipm", "noise", "mimic",
    "copycat", "withheld(share=1)", "scale(factor=10)",
)  # fmt: skip


def main() -> None:
    """Run what the file does not hold yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alpha", type=float, default=1.0, help="of the Dirichlet shares: smaller is less even")
    parser.add_argument("--rounds", type=int, default=20, help="of ten inner steps each")
    parser.add_argument("--seeds", type=int, default=5, help="seeds with all attacks")
    parser.add_argument("--tax-seeds", type=int, default=10, help="seeds without an attack")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="all, unless said")
    parser.add_argument("--out", type=Path, default=CELLS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = {result.cell for result in finished(given.out)}
    for cell in cells(given.rules, given.alpha, given.rounds, given.seeds, given.tax_seeds):
        if cell not in done:
            print(append(given.out, cell, run(cell)), flush=True)


def cells(rules: list[str], alpha: float, rounds: int, seeds: int, tax_seeds: int) -> Iterator[Cell]:
    """Whole seeds, so that what is there when it is interrupted can be compared; those without an attack first."""
    for seed in range(tax_seeds):
        for rule in rules:
            yield Cell(rule, NONE, alpha, seed, rounds)
    for seed in range(seeds):
        for attack in ATTACKS:
            for rule in rules:
                yield Cell(rule, attack, alpha, seed, rounds)


def rule_of(name: str) -> Aggregation:
    """With the keys that this table has for it."""
    return make_aggregation(name, RULES[name])


def run(cell: Cell) -> dict[str, object]:
    """Loss and accuracy on the digits kept back, after the last round or where training broke off."""
    began = time.process_time()
    attack = None if cell.attack == NONE else make_attack(cell.attack)
    hostile = torch.randperm(PEERS, generator=torch.Generator().manual_seed(cell.seed))[:HOSTILE].sort().values.tolist()
    digits, trainers = Digits.split(PEERS, cell.alpha, cell.seed), Trainers(PEERS, INNER_LR)
    terms = Terms(rule_of(cell.rule), COMPRESSOR, FEEDBACK, OUTER_LR)
    swarm = Swarm(terms, SHAPES, first_model(cell.seed), PEERS, hostile)
    told = _train(swarm, digits, trainers, attack, cell)
    loss, accuracy = digits.judge(swarm.anchor_N)
    return {
        "accuracy": round(accuracy, 5),
        "loss": round(loss, 5) if math.isfinite(loss) else None,
        **told,
        "cpu_seconds": round(time.process_time() - began, 2),
    }


def _train(swarm: Swarm, digits: Digits, trainers: Trainers, attack: Attack | None, cell: Cell) -> dict[str, object]:
    batches, draws = torch.Generator().manual_seed(1000 + cell.seed), torch.Generator().manual_seed(2000 + cell.seed)
    unmoved, rounds, shared = 0, 0, list[float]()
    for _ in range(cell.rounds):
        given = [digits.batch(BATCH, batches) for _ in range(STEPS)]
        for _, label_PB in given:
            label_PB[swarm.hostile] = (
                attack.labels(label_PB[swarm.hostile], LABELS) if attack else label_PB[swarm.hostile]
            )
        change_PN = swarm.anchor_N - trainers.train(swarm.anchor_N, given)
        if not bool(change_PN.isfinite().all()):  # a peer that finds NaN says so and stops
            break
        unmoved += bool(swarm.meet(change_PN, attack, draws).unmoved)
        rounds += 1
        shared += _overlaps(swarm, attack)
    overlap = {"overlap": round(sum(shared) / len(shared), 4), "most_overlap": round(max(shared), 4)} if shared else {}
    return {"rounds": rounds, "unmoved": unmoved, **overlap}


def _overlaps(swarm: Swarm, attack: Attack | None) -> list[float]:
    """Places in common: of honest pairs without an attack, and of each copycat with the peer that it copied."""
    if attack is None:
        sent = list(swarm.sent().values())
        return [index_overlap(one, other) for k, one in enumerate(sent) for other in sent[:k]]
    if attack.name != "copycat":
        return []
    sent_N = swarm.sent()
    return [index_overlap(sent_N[n], sent_N[m]) for n, m in zip(swarm.hostile, swarm.honest, strict=False)]


if __name__ == "__main__":
    main()
