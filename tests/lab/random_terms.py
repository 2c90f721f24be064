"""Terms drawn evenly: a method, a compressor with any of its keys, a feedback, an inner optimizer, H.

    python -m tests.lab.random_terms found.jsonl --fitting 2000 --processes 2

tries the seeds in their order until so many fit, a line each, and counts what was refused and what ruins a run. A seed
that is there is not run again.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import multiprocessing
import random
from pathlib import Path
from typing import Any

import torch

from decentral.errors import ConfigError
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.manifest.terms import INNER_OPTIMIZERS
from decentral.optimizers import presets
from decentral.trial.check import check_learns, trial
from decentral.trial.own_model import OwnCourse
from tests.lab.student import builder

TOLD_BY_LOSSES = ("just_one_byte",)  # sends derivatives, of an inner optimizer that the quadratic does not have
ROUNDS = 40  # of the student
UNCERTAIN = 1.02  # times the start: two that learn nothing end on either side of it
QUANTISERS = (
    "none", "bf16", "fp16", "fp8(block=256)", "int8(block=4096)", "int4(block=256)", "nf4(block=64)", "e3m0(block=256)",
    "sign(block=1024)", "signmag2", "sparseloco2", "natural", "qsgd(levels={levels}, block=256)", "codebook8",
)  # fmt: skip
SPARSIFIERS = (
    "topk(k={k}, chunk=4096)", "randk(k={k}, chunk=4096)", "dct(k={k}, chunk=4096)", "threshold(k={k}, sample=0.01)",
    "lowrank(rank={rank}, iterations=4)",
)  # fmt: skip
FEEDBACKS = ("none", "ef(beta={beta})", "ef21", "econtrol(eta={eta})", "dgc(momentum={beta})")


def drawn(seed: int) -> Manifest | None:
    """The terms of this seed; None where they are refused because parts of them do not fit each other."""
    random_ = random.Random(seed)
    numbers = {
        "k": round(2 ** random_.uniform(0, 12)),
        "levels": random_.choice([1, 3, 7, 15, 127]),
        "rank": random_.randint(1, 32),
        "beta": round(random_.uniform(0, 0.999), 3),
        "eta": round(random_.uniform(0, 0.1), 4),
    }
    preset = random_.choice(sorted(presets()))
    quantiser, sparsifier = random_.choice(QUANTISERS), random_.choice(SPARSIFIERS)
    chain = random_.choice([quantiser, sparsifier, f"{sparsifier} >> {quantiser}"]).format(**numbers)
    feedback = random_.choice(FEEDBACKS).format(**numbers)
    exchange = presets()[preset].exchange
    kind = exchange if exchange == "pair" else random_.choice(["gather", "reduce"])
    inner = {"optimizer": random_.choice([*INNER_OPTIMIZERS, "adamw", "adamw"])}
    if INNER_OPTIMIZERS[inner["optimizer"]].forward_only:
        inner |= {"weight_decay": 0.0, "clip": None}
    fragments = presets()[preset].fragments
    least = fragments * (presets()[preset].overlap + 1)
    steps = max(least, random_.randint(1, 60))
    try:
        manifest = preset_manifest(
            preset,
            run={"salt": "0"},
            inner={**inner, "steps": steps - steps % fragments},
            compressor={"chain": chain, "feedback": feedback},
            exchange={"kind": kind},
        )
        check_methods(manifest)
    except ConfigError:
        return None
    return manifest


def refusal(terms: Manifest) -> str | None:
    """Say what speaks against founding a run by these terms; None: nothing."""
    try:
        check_learns(terms)
    except ConfigError as error:
        return str(error)
    return None


def on_the_student(terms: Manifest, rounds: int = ROUNDS) -> tuple[float, float]:
    """The loss at the start and at the end."""
    fragments = terms.outer.fragments
    course = OwnCourse(builder(terms.inner, fragments), terms.changed(run={"rounds": rounds * fragments}), 2)
    return course.go(0), course.go(rounds * terms.inner.steps)


# ---- many of them ----


def tried(seed: int) -> dict[str, Any]:  # Any: JSON
    """The terms of this seed, why they are refused, and how they end on the quadratic and on the student."""
    terms = drawn(seed)
    if terms is None:
        return {"seed": seed, "fits": False}
    start, end = on_the_student(terms)
    quadratic = None if terms.outer.method in TOLD_BY_LOSSES else trial(terms)
    told = {"method": terms.outer.method, "steps": terms.inner.steps, "inner": terms.inner.optimizer_name}
    told |= {"chain": terms.compressor.chain, "feedback": terms.compressor.feedback, "exchange": terms.exchange.kind}
    return {
        "seed": seed, "fits": True, **told, "refused": refusal(terms),
        "quadratic": quadratic, "start": start, "end": end,
    }  # fmt: skip


def ruins(one: dict[str, Any]) -> bool:
    """Tell whether a run by these terms ended above its start on either."""
    end = one["end"]
    return math.isnan(end) or end > UNCERTAIN * one["start"] or (one["quadratic"] or 0.0) > 1.0


def counted(lines: list[dict[str, Any]]) -> str:
    """The counts in a few lines, and each that was accepted and ruins a run."""
    fitting = [one for one in lines if one["fits"]]
    kinds = collections.Counter(("refused" if one["refused"] else "accepted", ruins(one)) for one in fitting)
    learns = sum(one["refused"] is None and one["end"] < 0.98 * one["start"] for one in fitting)
    told = [
        f"{len(fitting)} of {len(lines)} fit; accepted {kinds['accepted', False] + kinds['accepted', True]}, of which "
        f"{learns} end below 0.98 of their start on the student and {kinds['accepted', True]} ruin a run",
        f"refused {kinds['refused', False] + kinds['refused', True]}, of which {kinds['refused', True]} ruin a run",
    ]
    return "\n".join([*told, *(json.dumps(one) for one in fitting if ruins(one) and not one["refused"])])


def main() -> None:
    """Try seeds until enough fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--fitting", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    known = {one["seed"] for one in lines}
    fit = sum(one["fits"] for one in lines)
    with (
        multiprocessing.get_context("spawn").Pool(given.processes, torch.set_num_threads, (1,)) as pool,
        given.file.open("a") as file,
    ):
        for one in pool.imap(tried, (seed for seed in range(10 * given.fitting) if seed not in known)):
            lines.append(one)
            fit += one["fits"]
            file.write(json.dumps(one) + "\n")
            file.flush()
            if fit >= given.fitting:
                break
    print(counted(lines))


if __name__ == "__main__":
    main()
