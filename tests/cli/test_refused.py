"""The law of refusals: the documented exit code, one line that says what to do, and every file and folder as it was,
below the home, the place where it was typed and wherever it was pointed to.

Every command has refused calls here; one without them fails. Each is typed in the same world: a peer's folder that is
taken, one of another run, texts and noise, manifests good and bad, a damaged checkpoint, a port that somebody holds.
"""

import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from torch import nn

from decentral.manifest import load_manifest, preset_manifest
from decentral.node import folder
from decentral.observe.status import ProcessInfo, Status, read_status, write_status
from decentral.state.export import export
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite
from decentral.tasks.corpus import tokenizer_files
from tests.cli.conftest import Run, every_command
from tests.kit import own_problems
from tests.kit.exports import kept, small_model
from tests.kit.families import INVITE
from tests.kit.processes import held_elsewhere

Tree = dict[str, tuple[int, int, bytes]]
Row = tuple[str, int, str]  # what is typed, the exit code, and what the line says

NOBODY_YET = "no peer has run here; name the directory it was started with by --out"
NO_INVITE = "garbage is not an invite; an invite begins with decentral1:"
OPTIONS_OF_A_PEER: list[Row] = [
    ("--bogus", 2, "no such option '--bogus'"),
    ("--max-upload 5mb", 2, "'5mb' is no rate; write it as 20mbit or 2.5MB/s"),
    ("--max-download 9kbit", 2, "'9kbit' is too little: other peers would take this one for dead"),
    ("--daily-upload 50", 2, "'50' is no size; write it as 50GB or 800MB"),
    ("--out file", 2, ""),
    ("--out file/run", 50, "file/run: cannot be made (Not a directory)"),
    ("--out taken", 2, "a peer runs here already (process"),
    ("--listen nonsense --out new", 2, ""),
    ("--listen /ip4/127.0.0.1/tcp/BUSY --out new", 1, "BUSY"),
    ("--listen /ip4/192.0.2.1/tcp/0 --out new", 1, "give an address that this machine has"),
    ("--offload absent/folder --out new", 10, "offload absent/folder: No such file or directory; name a folder"),
    ("--relay nonsense --out new", 2, ""),
    ("--metrics BUSY --out new", 1, "--metrics 127.0.0.1:BUSY: cannot listen"),
    ("--data absent --out new", 30, "cannot be read"),
    ("--data short --out new", 30, "holds 9 bytes of text"),
    ("--data noise --out new", 30, ""),
]
COMMANDS: dict[str, list[Row]] = {
    "": [
        ("satrt", 2, "no such command 'satrt'; did you mean 'start'?"),
        ("xyzzy", 2, "no such command 'xyzzy'; decentral --help lists them"),
    ],
    "demo": [
        ("--algorithm sparselcoo", 2, "'sparselcoo' does not exist; did you mean sparseloco?"),
        ("--peers 0", 2, "0 is not in the range"),
        ("--minutes fast", 2, "'fast' is not a valid float"),
        ("--out photos", 2, "photos is not empty and no earlier demo made it"),
        ("--out file/demo", 50, ""),
        ("--out demo", 2, ""),
    ],
    "init": [
        ("", 2, "missing argument 'RUN.toml'; see"),
        ("run.toml", 2, "run.toml exists; --force writes over it"),
        ("new.toml --preset sparselco", 2, "preset 'sparselco' does not exist; did you mean sparseloco?"),
        ("run.toml --force --compressor topk(k=0)", 10, "want 1 <= k <="),
        ("new.toml --compressor tpok(k=3)", 10, "topk"),
        ("new.toml --inner-steps 0", 2, "0 is not in the range x>=1"),
        ("new.toml --inner-steps 5 --overlap 9", 10, "outer.overlap = 9 must be below inner.steps"),
        ("absent/new.toml", 50, "absent/new.toml: cannot be written (No such file or directory)"),
        ("new.toml --data absent", 30, ""),
        ("new.toml --data noise", 30, ""),
        ("new.toml --data foxes --corpus stdlib", 2, ""),
        ("new.toml --task custom --data foxes", 2, "--data is text for causal-lm; with --task custom a script reads"),
        ("--link 20mb", 2, "'20mb' is no rate; write it as 20mbit or 2.5MB/s, or as 900kbit or 1gbit; see"),
        ("--link 9kbit", 2, "'9kbit' is too little: other peers would take this one for dead; 263kbit is the least"),
        ("--link 20mbit --step-time 0.4", 2, "'0.4' is no time; write it as 0.4s or 400ms"),
        ("--link 20mbit --step-time 0s", 2, "'0s' is no time; write it as 0.4s or 400ms"),
        ("--link 20mbit --model-size 30m", 2, "'30m' is no number of parameters; write it as 30M, 1.5B or"),
        ("--link 20mbit --peers 1", 2, "1 is not in the range 2<=x<=64"),
        ("new.toml --step-time 1s", 2, "--step-time is for choosing terms by a line; add --link, as 20mbit"),
        ("new.toml --model-size 30M --experts 4", 2, "--model-size is for a model without experts; leave"),
        ("new.toml --model-size 30k", 10, "none of that size; take 21600 or 34976, or --task custom"),
        ("new.toml --task custom --experts 4", 2, "--experts is for causal-lm; with --task custom your script's"),
        ("new.toml --compressor wood", 10, "install that package; known: bf16, "),
        ("new.toml --preset muloco --compressor randk(k=4,chunk=4096)", 10, 'use compressor.feedback = "none"'),
    ],
    "tune": [
        ("train.py", 2, "'train.py' names no function of a script; write it as train.py:build"),
        ("absent.py:build", 2, "absent.py: there is no such file; name the script"),
        ("SCRIPT:biuld", 2, "own_problems.py has no function 'biuld'; it builds one peer's training"),
        ("SCRIPT:nothing --out new.toml", 10, "gave a Linear; it must give four: a model, its optimizer"),
        ("wrong.py:build", 2, "wrong.py:build: ModuleNotFoundError: No module named"),
        ("raises.py:build", 2, "RuntimeError: no data here; decentral --traceback tune ... shows where"),
        ("bad.toml:build", 2, ""),
        ("SCRIPT:build --data foxes", 10, "leave it out"),
        ("SCRIPT:build --out run.toml", 2, "run.toml exists; --force writes over it"),
        ("custom.toml", 10, "give the function that builds it instead"),
        ("foxes.toml", 30, "name your copy of it with --data"),
        ("absent.py:build --link fast", 2, ""),
    ],
    "start": [
        ("absent.toml", 10, "absent.toml: no such manifest; write one with: decentral init absent.toml"),
        ("bad.toml", 10, ""),
        ("custom.toml --out new", 10, "the run has a script of its own, which python starts"),
        ("streams.toml --out new", 10, "outer.fragments = 5: the 3 blocks of model.layers"),
        ("run.toml --out other", 11, ""),
        ("run.toml --solo --out other", 11, ""),
        ("run.toml --from photos --out new", 2, "--from photos: no model.safetensors there"),
        ("run.toml --from packed --out new", 2, "--from packed is packed; unpack it with"),
        ("run.toml --from half --out new", 2, "--from half: model.safetensors cannot be read"),
        ("run.toml --data foxes --out new", 30, ""),
        ("foxes.toml --out new", 30, "the run trains on foxes; name your copy of it with --data PATH"),
        ("foxes.toml --data wolves --out new", 30, ""),
        ("run.toml --pace taken --out new", 2, ""),
        ("run.toml --solo --require-peers 3 --out new", 2, "--solo meets nobody and --require-peers waits for others"),
        ("run.toml --alone --require-peers 2 --out new", 2, "--alone waits for nobody"),
        ("run.toml --admit - --out new", 2, "-: no token came on stdin"),
        ("run.toml --admit @absent --out new", 2, "@absent: cannot be read (No such file or directory)"),
        ("run.toml --admit @. --out new", 2, "@.: cannot be read (Is a directory)"),
        ("run.toml --admit @empty --out new", 2, "@empty: is empty"),
        ("run.toml --admit @noise --out new", 2, "@noise: cannot be read ("),
        ("run.toml --admit @guess --out new", 2, "admission token of 5 characters"),
        ("run.toml --admit guess --out new", 2, "admission token of 5 characters"),
        *((f"run.toml {options}", code, says) for options, code, says in OPTIONS_OF_A_PEER),
    ],
    "join": [
        ("", 2, "missing argument 'INVITE'"),
        ("garbage", 2, NO_INVITE),
        ("decentral1:AAAA", 2, "cut short"),
        ("decentral9:AAAA", 2, "made by another version of this program"),
        ("acid cargo mural tulpi 4711", 2, "perhaps tulip"),
        ("acid cargo mural tulip 99", 2, "is no number"),
        ("acid cargo mural tulip 4711 --relay 127.0.0.1:1 --no-lan", 1, "is it up"),
        ("DEAD --out other", 11, ""),
        ("KNOWN --out known", 30, ""),
        ("KNOWN --out known --data wolves", 30, ""),
        ("DEAD --script nowhere.py", 2, "--script nowhere.py: no such file"),
        ("DEAD --script run.toml --json", 2, "--data and --json are for the model of the manifest"),
        ("DEAD -- --seed 7", 2, "'--seed': arguments after the invite are a script's; name it with --script"),
        ("DEAD --join-timeout 0.2 --no-lan --transport native --listen LOCAL --out new", 20, "no peer of run"),
        *((f"DEAD {options}", code, says) for options, code, says in OPTIONS_OF_A_PEER),
    ],
    "follow": [
        ("garbage", 2, NO_INVITE),
        ("acid cargo mural tulpi 4711", 2, "perhaps tulip"),
        ("DEAD --out other", 11, ""),
        ("DEAD --out damaged", 2, "the folder of a peer that trains"),
        ("DEAD --out file/of", 50, ""),
        ("DEAD --listen nonsense --out new", 2, ""),
        ("DEAD --listen /ip4/127.0.0.1/tcp/BUSY --out new", 1, "BUSY"),
        ("DEAD --relay nonsense --out new", 2, ""),
        ("DEAD --every 0", 2, ""),
        ("DEAD --max-disk 5", 2, ""),
        ("DEAD --join-timeout 0.2 --no-lan --transport native --listen LOCAL --out new", 20, "no peer of run"),
    ],
    "relay": [
        ("--keep garbage --listen LOCAL", 2, "garbage"),
        ("--listen nonsense", 2, ""),
        ("--listen /ip4/127.0.0.1/tcp/BUSY", 1, "BUSY"),
        ("--listen /ip4/127.0.0.1/udp/1/quic-v1", 2, "TCP only"),
        ("--announce nonsense --listen LOCAL", 2, "--announce 'nonsense': want /ip4/HOST/tcp/PORT"),
        ("--announce /ip4/192.0.2.1/tcp/1/p2p/12D3KooW --listen LOCAL", 2, "/dns4/NAME/tcp/PORT, and no more"),
        ("--metrics nonsense --listen LOCAL", 2, "--metrics 'nonsense': want PORT, or HOST:PORT"),
        ("--metrics localhost:70000 --listen LOCAL", 2, "want PORT, or HOST:PORT"),
        ("--metrics 127.0.0.1:BUSY --listen LOCAL", 1, "BUSY"),
        ("--identity file/key --listen LOCAL", 50, ""),
        ("--identity noise --listen LOCAL", 10, "noise: not an Ed25519 identity"),
        ("--max-memory 60MB --listen LOCAL", 10, "allow more memory or fewer peers"),
        ("--max-peers 0", 2, "invalid value for '--max-peers'"),
        ("--max-rate 5mb", 2, "'5mb' is no rate"),
    ],
    "status": [
        ("", 2, f"decentral-run: {NOBODY_YET}"),
        ("--bogus", 2, "no such option '--bogus'"),
        ("--out broken", 2, "not readable"),
        ("--out demo", 2, f"demo: {NOBODY_YET}: demo/peer-0"),
        ("--out newer", 21, "another version of decentral wrote it"),
        ("--prometheus --json", 2, ""),
    ],
    "peers": [("--out new", 2, f"new: {NOBODY_YET}"), ("--out broken", 2, "not readable")],
    "logs": [
        ("--out new", 2, NOBODY_YET),
        ("--out ended", 2, "no events are kept there; a baseline (start --solo) writes none"),
        ("--last 0", 2, ""),
    ],
    "doctor": [
        ("garbage", 2, NO_INVITE),
        ("acid cargo mural tulip 99", 2, "is no number"),
        ("--relay nonsense", 2, "relay 'nonsense': want /ip4/HOST/tcp/PORT/p2p/NAME, as decentral relay prints it"),
        ("--bogus", 2, ""),
    ],
    "pause": [("--out new", 2, NOBODY_YET), ("--out ended", 2, "has ended (done)"), ("--for soon", 2, "")],
    "finish": [("--out new", 2, NOBODY_YET), ("--out ended --wait 1", 2, "has ended (done)")],
    "schedule": [("night", 2, ""), ("22:00-07:00 --out new", 2, "")],
    "set": [
        ("max-uploads 5mbit", 2, ""),
        ("max-upload 1kbit --out ended", 2, "'1kbit' is too little"),
        ("max-memory 1KB --out ended", 2, ""),  # less than Python takes
        ("threads 0", 2, ""),
        ("threads 2 --out new", 2, ""),
    ],
    "invite": [
        ("--out new", 2, NOBODY_YET),
        ("--out ended", 2, ""),
        ("--relay x --out taken", 2, "add --words"),
        ("--bogus", 2, ""),
    ],
    "resume": [("--out new", 2, NOBODY_YET), ("--out ended", 2, "has ended (done)")],
    "leave": [
        ("--out new", 2, NOBODY_YET),
        ("--out ended --wait 1", 2, "has ended (done); nothing to leave"),
    ],
    "support": [
        ("--out new", 2, NOBODY_YET),
        ("--out taken --to file --no-doctor", 2, "is there already"),
        ("--bogus", 2, ""),
    ],
    "generate": [
        ("new --prompt a", 2, "'new' does not exist"),
        ("photos --prompt a", 2, "neither a run directory with checkpoints nor a model folder"),
        ("mine --prompt a", 2, "only its script can build"),
        ("model --prompt ", 2, "an empty text has no token to go on from"),
    ],
    "evaluate": [
        ("half --data foxes", 50, "half/model.safetensors cannot be read"),
        ("new", 2, ""),
        ("packed", 2, "unpack it with decentral export packed --to FOLDER"),
        ("novels", 30, 'the run trains on "novels"'),
    ],
    "compare": [("new new", 2, "no run directory"), ("new", 2, "name 2 to 8")],
    "dashboard": [
        ("--host 192.0.2.1", 2, "(Cannot assign requested address); choose another --host, one of this machine"),
        ("--bogus", 2, ""),
        ("--port 99999", 2, ""),
        ("--replay new", 2, "does not exist"),
    ],
    "watch": [
        ("--bogus", 2, ""),
        ("--out file", 2, ""),
        # no test has a terminal
        ("--out taken", 2, "not a terminal that a view can be drawn on; decentral status says the same in lines"),
    ],
    "service": [("--bogus", 2, ""), ("nothing", 2, "")],
    "service install": [
        ("-- train", 2, ""),
        ("-- join", 2, ""),
        ("-- join garbage", 2, "garbage"),
        ("--name A -- relay", 2, ""),
        ("", 2, ""),
    ],
    "service remove": [("--name nobody", 2, ""), ("--name A/B", 2, "")],
    "service status": [("--bogus", 2, "")],
    "export": [
        ("new --to goes", 2, "new: not a run directory with checkpoints"),
        (". --to goes", 2, ".: not a run directory with checkpoints"),
        ("damaged --to goes", 50, ""),
        ("damaged --to deep/er/goes", 50, ""),
        ("damaged --to photos", 2, ""),
        ("model --to photos", 2, "photos exists and is not an empty folder"),
    ],
    "identity": [("nosuch", 2, "")],
    "identity show": [
        ("--out new", 2, "no identity.key; a peer makes one at its first start"),
        ("--out broken", 10, ""),
    ],
    "identity export": [("--out new", 2, ""), ("--out broken", 10, "")],
    "identity import": [
        ("absent.key --out new", 2, "absent.key: cannot be read"),
        ("file --out new", 2, ""),
        ("my.key --out broken", 10, "there is an identity already"),
    ],
    "optimizers": [("--bogus", 2, "")],
    "aggregation": [("--bogus", 2, "")],
    "compressors": [("--bogus", 2, "")],
    "feedback": [("--bogus", 2, "")],
    "bench": [("nosuch", 2, "")],
    "bench compressors": [
        ("--rows 100", 2, "want a multiple of 64"),
        ("--rows 3", 2, "3 is not in the range"),
        ("--only nosuch", 2, "no method has that in its name; decentral compressors lists them"),
        ("--data absent", 2, ""),
        ("--data noise", 30, ""),
    ],
    "bench transport": [("--bogus", 2, "")],
    "bench stages": [("--peers 1", 2, ""), ("--compressor nosuch", 10, "")],
    "bench exchange": [("--peers 1", 2, ""), ("--compressor nosuch", 10, "")],
    "lab": [
        ("absent.toml", 10, ""),
        ("bad.toml", 10, ""),
        ("noise", 10, ""),
        ("study.toml --workers 0", 2, ""),
        ("study.toml --out file", 2, ""),
        ("study.toml --out file/of", 50, ""),
        ("study.toml --out photos", 2, ""),
        ("unfit.toml", 10, ""),
    ],
    "simulate": [
        ("absent.toml", 10, ""),
        ("bad.toml", 10, ""),
        ("run.toml --profile nosuch", 2, ""),
        ("run.toml --step-time 1s --step-seconds 1", 2, "--step-seconds and --step-time are one and the same"),
        ("run.toml --by rounds --profile storm --parameters 10000", 10, "--by messages"),
        ("run.toml --by rounds --learn --parameters 10000", 10, "--by messages"),
        ("run.toml --share 5", 2, ""),
        ("run.toml --share 3 --peers 4", 2, "leave --peers out"),
        ("run.toml --share 3", 10, ""),
    ],
}
FULL = [
    ("init new.toml", 50),
    ("init run.toml --force", 50),
    ("start run.toml --solo --out new", 50),
    ("start run.toml --no-lan --transport native --listen LOCAL --out new", 50),
    ("relay --listen LOCAL", 50),
    ("identity import my.key --out new", 50),
]
MANIFEST = """
[run]
name = "test"
[outer]
method = "diloco"
[compressor]
chain = "none"
[exchange]
kind = "reduce"
"""
WRITTEN = [  # what stands in it, what stands there instead, and what the line says; tests/manifest has many more
    ("[outer]", "[outr]", "unknown table outr; did you mean outer? (and 1 more)"),
    ('"none"', '"topk(k=9000, chunk=4096)"', "want 1 <= k <= 4096"),
    ('"reduce"', '"pair"', "does not fit outer.method diloco"),
    ("[compressor]", "[compressor]\nfeedback = 'ef(beta=1.5)'", "debt's decay"),
    (MANIFEST, "this is not TOML", "not TOML"),
]
STUDY = """[study]
name = "law"
rounds = 1
learning_rates = [0.001]

[[method]]
name = "diloco"
preset = "diloco"
"""

MADE_AND_REMOVED = (20, 50)  # a folder was there for a while: the time of change of the one above says so
BEFORE = ("looking for the run's peers ...", "data ", "warning: ")  # lines that may stand before the error's


def tree(root: Path) -> Tree:
    """Every path below ``root`` with its mode, its time of change and its bytes."""
    found = {}
    for path in (root, *sorted(root.rglob("*"))):
        state = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (state.st_mode, state.st_mtime_ns, content)
    return found


@pytest.fixture
def busy() -> Iterator[int]:
    """A port that somebody holds."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def write_manifests(world: Path) -> None:
    small = {"model": {"hidden": 16, "layers": 1, "heads": 2, "context": 16}, "run": {"rounds": 2, "salt": "law"}}
    terms = preset_manifest("diloco", **small)
    foxes = terms.changed(data={"corpus": "foxes", "digest": "ab" * 32})
    (world / "run.toml").write_text(terms.to_toml())
    (world / "foxes.toml").write_text(foxes.to_toml())
    (world / "custom.toml").write_text(terms.changed(model={"task": "custom"}).to_toml())
    (world / "streams.toml").write_text(
        preset_manifest("streaming", outer={"fragments": 5}, model={"layers": 3}).to_toml()
    )
    (world / "study.toml").write_text(STUDY)
    (world / "unfit.toml").write_text(STUDY.replace("rounds = 1", "tokens = 1"))
    (world / "bad.toml").write_text("[run]\nname = 3\n")
    for name in ("other", "known"):
        (world / name).mkdir()
    (world / "known/run.toml").write_text(foxes.to_toml())
    (world / "other/run.toml").write_text(terms.changed(run={"seed": 9}).to_toml())


def write_folders(world: Path) -> None:
    for name in ("taken", "ended", "newer", "broken", "damaged/checkpoints/round-000001", "photos", "demo/peer-0"):
        (world / name).mkdir(parents=True)
    write_status(world / "taken", Status(state="training", invite=INVITE), ProcessInfo())
    write_status(world / "demo/peer-0", Status(state="training"), ProcessInfo())
    (world / "demo/.decentral-demo").touch()
    write_status(world / "ended", Status(state="done"), ProcessInfo(pid=2**22, created=1.0))
    (world / "newer/status.json").write_text('{"version": 99}')
    (world / "broken/status.json").write_text("{")
    (world / "broken/identity.key").write_bytes(b"no key")
    (world / "broken/identity.key").chmod(0o600)
    (world / "damaged/checkpoints/round-000001/meta.json").write_text("{}")
    (world / "photos/cat.png").write_bytes(b"meow")
    (world / "my.key").write_text(Identity.load_or_create(world / "key").export_text())


def write_models(world: Path) -> None:
    kept(world / "mine", nn.Linear(2, 2), "custom")
    for name in ("model", "novels"):
        kept(world / name, small_model(), "causal-lm")
    terms = world / "novels/run.toml"
    terms.write_text(terms.read_text().replace('corpus = "stdlib"', 'corpus = "novels"'))
    export(world / "model/checkpoints", world / "packed", packed=True)
    export(world / "model/checkpoints", world / "half", tokenizer_files)
    weights = world / "half/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def make_world(world: Path) -> Path:
    world.mkdir()
    write_manifests(world)
    write_folders(world)
    write_models(world)
    (world / "file").write_text("a file")
    (world / "short").write_text("too short")
    (world / "empty").touch()
    (world / "guess").write_text("guess")
    (world / "guess").chmod(0o600)
    (world / "noise").write_bytes(bytes(n * n * 31 % 251 ^ 0x80 for n in range(100_000)))
    (world / "foxes").write_bytes(b"the quick brown fox. " * 5000)
    (world / "wolves").write_bytes(b"the big bad wolf. " * 5000)
    (world / "wrong.py").write_text("import nowhere_to_be_found\n")
    (world / "raises.py").write_text("def build(number):\n    raise RuntimeError('no data\\nhere')\n")
    return world


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: what is refused leaves it as it was."""
    return make_world(tmp_path_factory.mktemp("refused") / "world")


@pytest.fixture
def world(made: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home and working directory in one; what stands there before every refused command."""
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(made))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(made)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python keeps that of a module of one's own beside it
    return made


def type_in(world: Path, run: Run, name: str, typed: str, busy: int) -> Result:
    known = load_manifest(world / "known/run.toml").digest
    meant = {
        "KNOWN": str(Invite(known, ())),
        "DEAD": INVITE,
        "BUSY": str(busy),
        "LOCAL": "/ip4/127.0.0.1/tcp/0",
        "SCRIPT": own_problems.__file__,
    }
    for word, text in meant.items():
        typed = typed.replace(word, text)
    return run(*name.split(), *(typed.split(" ") if typed else ()))


def faults(before: Tree, after: Tree, result: Result, code: int, says: str = "") -> list[str]:
    """What is not as it is promised of a refusal."""
    *above, line = result.stderr.splitlines() or [""]
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    if code in MADE_AND_REMOVED:
        changed.discard(".")
    found = []
    if changed:
        found.append(f"changed: {sorted(changed)}")
    if result.exit_code != code:
        found.append(f"code {result.exit_code}, and not {code}")
    if not line.startswith("error: ") or says not in line:
        found.append(f"{line!r} does not say {says!r}")
    if result.stdout or not all(one.startswith(BEFORE) for one in above):
        found.append(f"more than a line: {result.output}")
    return found


def test_every_command_has_refused_calls_here() -> None:
    assert set(COMMANDS) - {""} == {name for name, _ in every_command()}
    assert all(COMMANDS.values())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_refused_command_says_why_in_one_line_and_changes_no_file(
    world: Path, run: Run, busy: int, name: str
) -> None:
    wrong = {}
    for typed, code, says in COMMANDS[name]:
        before = tree(world)
        result = type_in(world, run, name, typed, busy)
        if found := faults(before, tree(world), result, code, says.replace("BUSY", str(busy))):
            wrong[f"{name} {typed}"] = found
    assert wrong == {}
    assert list(Path(tempfile.gettempdir()).glob("decentral*")) == []


@pytest.mark.parametrize(("typed", "code"), FULL, ids=[typed for typed, _ in FULL])
def test_a_command_that_the_disk_refuses_changes_no_file(
    world: Path, run: Run, busy: int, typed: str, code: int
) -> None:
    """A limit of no byte a file stands for a full disk: names can be made, nothing can be written."""
    before = tree(world)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        result = type_in(world, run, "", typed, busy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert faults(before, tree(world), result, code) == []
    assert list(Path(tempfile.gettempdir()).glob("decentral*")) == []


@pytest.mark.parametrize(("old", "new", "says"), WRITTEN, ids=[says for _, _, says in WRITTEN])
def test_a_manifest_that_cannot_work_is_answered_in_one_line(
    run: Run, tmp_path: Path, old: str, new: str, says: str
) -> None:
    (tmp_path / "run.toml").write_text(MANIFEST.replace(old, new))
    before = tree(tmp_path)
    result = run("start", "run.toml")
    assert faults(before, tree(tmp_path), result, 10, says) == []


@pytest.mark.long
def test_a_start_that_another_was_faster_than_leaves_what_that_one_has_just_made(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(MANIFEST)
    out, take = tmp_path / "decentral-run", folder._take_lock

    def while_the_other_begins(*arguments: object) -> None:
        (out / "identity.key").write_text("of the other")
        take(*arguments)

    monkeypatch.setattr(folder, "_take_lock", while_the_other_begins)
    with held_elsewhere(out):
        refused = run("start", "run.toml", "--solo")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: decentral-run: a peer begins here just now; choose another")
    assert (out / "identity.key").read_text() == "of the other"


@pytest.mark.long
def test_a_start_whose_peers_do_not_come_leaves_only_a_folder_in_which_it_can_be_started_again(
    run: Run, tmp_path: Path
) -> None:
    """It has voted there: that may not be taken back."""
    write_manifests(tmp_path)
    before = tree(tmp_path)
    net = ["--no-lan", "--transport", "native", "--listen", "/ip4/127.0.0.1/tcp/0"]
    start = ["start", "run.toml", *net, "--out", "new"]
    typed = [sys.executable, "-m", "decentral", *start, "--require-peers", "2", "--join-timeout", "0.2"]
    refused = subprocess.run(typed, capture_output=True, text=True)  # a process of its own: it must have ended
    assert refused.returncode == 20, refused.stderr
    assert "error: 1 of 2 peers" in refused.stderr
    assert "then this one again in new, where it goes on as the same peer" in refused.stderr
    changed = {path for path, state in tree(tmp_path).items() if before.get(path) != state}
    assert {Path(path).parts[:1] for path in changed} <= {(), ("new",)}
    assert read_status(tmp_path / "new").state == "left"
    me = read_status(tmp_path / "new").peer
    assert run(*start, "--alone").exit_code == 0
    assert (read_status(tmp_path / "new").state, read_status(tmp_path / "new").peer) == ("done", me)
