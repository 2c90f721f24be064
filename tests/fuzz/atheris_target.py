"""One decoder under libFuzzer's coverage-guided mutation.

    python -m tests.fuzz.atheris_target "stream rising" --seconds 60 --out fuzz-out

Ends with 0 after the time, with another code at the first exception that is not the target's own; the input is then
in ``OUT/crashes``. Numba is off, so that what guides the fuzzer sees the loops over a peer's bytes too, as Python.
"""

import argparse
import contextlib
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path

os.environ["NUMBA_DISABLE_JIT"] = "1"  # before anything imports numba

import atheris

with atheris.instrument_imports(include=["decentral"]):
    from tests.corpus.make import FOLDER, slug
    from tests.fuzz.targets import TARGETS

WARM = 2000  # inputs after which memory is first measured
SLOWEST, LONGEST = 10, 4096  # s and bytes of one input


class Watched:
    """The target, and a file that always says how far it has come: libFuzzer ends the process by itself."""

    def __init__(self, name: str, report: Path) -> None:
        self.target, self.report = TARGETS[name], report
        self.runs, self.started, self.written, self.first = 0, time.monotonic(), 0.0, 0

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(self.target.refusal):
            self.target.read(data)
        self.runs += 1
        now = time.monotonic()
        if now - self.written > 1 or self.runs == WARM:
            self._write(now)

    def _write(self, now: float) -> None:
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.runs <= WARM:
            self.first = rss
        self.written = now
        self.report.write_text(
            json.dumps(
                {
                    "target": self.target.name,
                    "inputs": self.runs,
                    "seconds": round(now - self.started, 1),
                    "rss_growth_mib": round((rss - self.first) / 2**20, 1),
                }
            )
        )


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("fuzz-out"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # without numba, arithmetic modulo 2**64 warns
    name = slug(options.target)
    kept, crashes = options.out / "inputs" / name, options.out / "crashes" / name
    for folder in (kept, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    seeds = [FOLDER / (slug("frame") if options.target == "sealed frame" else name)]
    flags = [f"-max_total_time={options.seconds}", f"-timeout={SLOWEST}", f"-max_len={LONGEST}", "-rss_limit_mb=4096"]
    flags += [f"-artifact_prefix={crashes}/", "-verbosity=0", "-seed=1"]
    folders = [str(kept), *(str(folder) for folder in seeds if folder.is_dir())]
    atheris.Setup([sys.argv[0], *flags, *folders], Watched(options.target, options.out / f"{name}.json"))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
