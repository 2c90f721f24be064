"""How few values a round may move before what waits overshoots: MASHA's second compression on stiff quadratics.

    OMP_NUM_THREADS=1 python experiments/both_ways/sweep.py

From a checkout: the quadratics are those of tests/laws. A line per setting: the last loss, and whether it is stable.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from decentral.optimizers.masha import Masha
from tests.laws.quadratic import Descent, Lossy
from tests.laws.test_stiff_quadratic import course

PEERS = 8


def main() -> None:
    """Inner steps that solve h <= 1, h <= .1, and h <= .1 through the preset's compressor and feedback."""
    print("choose   parts keep  h<=1, 200 rounds  h<=.1, 500 rounds  h<=.1 compressed, 200 rounds")
    for choose, parts, keep in product(("largest", "random"), (1, 2, 4, 8, 16, 32, 64), (0.95, 1.0)):
        method = Masha(choose=choose, parts=parts, keep=keep)
        runs = [
            course(Descent(method, PEERS), 200),
            course(Descent(method, PEERS, rate=0.01), 500),
            course(Descent(method, PEERS, Lossy.of("masha"), clips=True, rate=0.01), 200),
        ]
        told = [f"{one.losses[-1]:.3g} {'stable' if one.is_stable else 'no'}" for one in runs]
        print(f"{choose:8} {parts:5} {keep:4}  " + "  ".join(f"{text:>16}" for text in told), flush=True)


if __name__ == "__main__":
    main()
