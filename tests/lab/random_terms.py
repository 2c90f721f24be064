"""Terms drawn evenly: a method, a compressor with any of its keys, a feedback, an inner optimizer, H."""

from __future__ import annotations

import random

from decentral.errors import ConfigError
from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.manifest.terms import INNER_OPTIMIZERS
from decentral.optimizers import presets

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
