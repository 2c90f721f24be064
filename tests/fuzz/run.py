"""All fuzzers for so many minutes: mutated frames on one core, libFuzzer's targets one after the other on another.

    python -m tests.fuzz.run --minutes 10 --out fuzz-out
    python -m tests.fuzz.run --minutes 90 --frames 10000000 --per-target 30 --only stream

Prints one JSON document at the end: frames, seconds, crashes, memory. Ends with 1 when anything crashed, or when
memory grew beyond 64 MiB while frames were taken. A crash is a file in ``OUT/crashes``: move it to the corpus.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MOST_GROWTH = 64.0  # MiB
WARM_FRAMES = 2000  # of each compressor, before memory is first measured
STARTING = 5.0  # s that a target takes before its first input
BATCH = 5000  # frames of one compressor before the next one's turn


def mutate_frames(options: argparse.Namespace) -> dict[str, Any]:
    """Mutated frames of every compressor in turn, until time or number is reached."""
    import psutil
    import torch

    from tests.fuzz.mutants import Count, Crash, run
    from tests.fuzz.targets import spellings

    torch.set_num_threads(1)
    total, crashes, rounds, first = Count(), [], 0, 0
    process, started = psutil.Process(), time.monotonic()
    rates: dict[str, list[float]] = {}
    while time.monotonic() - started < options.seconds and not (options.frames and total.frames >= options.frames):
        for spelling in spellings():
            before, begun = total.frames, time.monotonic()
            try:
                run(spelling, BATCH if rounds else WARM_FRAMES, f"{options.seed} {rounds}", total)
            except Crash as crash:
                crashes.append(f"{crash.save(options.out / 'crashes')}: {crash.target}: {crash}")
            frames, seconds = rates.setdefault(spelling, [0, 0.0])
            rates[spelling] = [frames + total.frames - before, seconds + time.monotonic() - begun]
        rounds += 1
        first = first or process.memory_info().rss
    seconds = time.monotonic() - started
    return {
        "frames": total.frames,
        "accepted": total.accepted,
        "refused_behind_the_signature": total.behind_the_signature,
        "seconds": round(seconds, 1),
        "frames_per_second": round(total.frames / seconds),
        "slowest_frame_ms": round(1000 * total.slowest, 1),
        "by_compressor": {spelling: round(frames / spent) for spelling, (frames, spent) in rates.items()},
        "rss_growth_mib": round((process.memory_info().rss - first) / 2**20, 1),
        "crashes": crashes,
    }


def fuzz_targets(options: argparse.Namespace) -> list[dict[str, Any]]:
    """libFuzzer's targets, one after the other."""
    from tests.corpus.make import slug
    from tests.fuzz.targets import TARGETS

    names = [name for name, target in TARGETS.items() if target.guided and options.only in name]
    seconds = 60 * options.per_target if options.per_target else 60 * options.minutes / len(names) - STARTING
    found, memory = [], "/dev/shm" if Path("/dev/shm").is_dir() else None
    for name in names:
        report = options.out / f"{slug(name)}.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.fuzz.atheris_target", name, "--out", str(options.out)]
        command += ["--seconds", str(max(1, round(seconds)))]
        with (options.out / f"{slug(name)}.log").open("w") as log, tempfile.TemporaryDirectory(dir=memory) as folder:
            environment = os.environ | {"TMPDIR": folder}  # libFuzzer ends without tidying up
            ended = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
        told = json.loads(report.read_text()) if report.exists() else {"target": name, "inputs": 0, "seconds": 0}
        told["inputs_per_second"] = round(told["inputs"] / max(0.1, told["seconds"]))
        told["crashes"] = [] if ended.returncode == 0 else [f"exit code {ended.returncode}: see {slug(name)}.log"]
        found.append(told)
    return found


def main() -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--frames", type=int, default=0, help="stop at so many mutated frames")
    parser.add_argument("--per-target", type=float, default=0.0, help="minutes of every libFuzzer target")
    parser.add_argument("--only", default="", help="libFuzzer targets with this word in their names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-out"))
    parser.add_argument("--part", choices=["all", "frames", "targets"], default="all")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.seconds = 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    if options.part == "frames":
        found = mutate_frames(options)
        print(json.dumps(found))
        return _code([found])
    frames = _start_frames(options) if options.part == "all" else None
    targets = fuzz_targets(options)
    report: dict[str, Any] = {"targets": targets}
    if frames is not None:
        text, _ = frames.communicate()
        report["frames"] = json.loads(text) if text else {"crashes": ["the mutator itself failed"]}
    print(json.dumps(report, indent=1))
    return _code([*targets, *([report["frames"]] if frames is not None else [])])


def _code(parts: list[dict[str, Any]]) -> int:
    """What the command ends with. libFuzzer's memory is its own collection of inputs, not ours."""
    grown = any("frames" in part and part["rss_growth_mib"] > MOST_GROWTH for part in parts)
    return 1 if grown or any(part["crashes"] for part in parts) else 0


def _start_frames(options: argparse.Namespace) -> "subprocess.Popen[str]":
    """In a process of its own, its kernels compiled with bounds checks and cached apart from the others."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(options.out / "numba")}
    words = ["--minutes", str(options.minutes), "--frames", str(options.frames), "--seed", str(options.seed)]
    command = [sys.executable, "-m", "tests.fuzz.run", "--part", "frames", *words, "--out", str(options.out)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    sys.exit(main())
