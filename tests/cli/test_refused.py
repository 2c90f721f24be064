"""The law: a command that refuses leaves every file and folder as it was, below the home, the place where it was typed
and wherever it was pointed to.

Every command has refused calls here; one without them fails. Each is typed in the same world: a peer's folder that is
taken, one of another run, texts and noise, manifests good and bad, a damaged checkpoint, a port that somebody holds.
"""

import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from decentral.manifest import load_manifest, preset_manifest
from decentral.observe.status import ProcessInfo, Status, read_status, write_status
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite
from decentral.wire.keys import Signer, peer_name
from tests.cli.test_commands import EVERY_COMMAND

Run = Callable[..., Result]
Tree = dict[str, tuple[int, int, bytes]]

DEAD = str(Invite(bytes(32), (f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(Signer(bytes(32)).peer)}",)))
OPTIONS_OF_A_PEER = [
    ("--bogus", 2),
    ("--max-upload 5mb", 2),
    ("--out file", 2),
    ("--out file/run", 50),
    ("--out taken", 2),
    ("--listen nonsense --out new", 2),
    ("--listen /ip4/127.0.0.1/tcp/BUSY --out new", 1),
    ("--listen /ip4/192.0.2.1/tcp/0 --out new", 1),
    ("--relay nonsense --out new", 2),
    ("--data absent --out new", 30),
    ("--data short --out new", 30),
    ("--data noise --out new", 30),
]
COMMANDS = {
    "demo": [("--peers 0", 2), ("--out photos", 2), ("--out file/demo", 50), ("--out demo", 2)],
    "init": [
        ("run.toml", 2),
        ("new.toml --preset nosuch", 2),
        ("run.toml --force --compressor topk(k=0)", 10),
        ("absent/new.toml", 50),
        ("new.toml --data absent", 30),
        ("new.toml --data noise", 30),
        ("new.toml --data foxes --corpus stdlib", 2),
    ],
    "tune": [
        ("train.py", 2),
        ("absent.py:build", 2),
        ("bad.toml:build", 2),
        ("absent.py:build --out run.toml", 2),
        ("absent.py:build --link fast", 2),
    ],
    "start": [
        ("absent.toml", 10),
        ("bad.toml", 10),
        ("custom.toml --out new", 10),
        ("run.toml --out other", 11),
        ("run.toml --solo --out other", 11),
        ("run.toml --data foxes --out new", 30),
        ("foxes.toml --out new", 30),
        ("foxes.toml --data wolves --out new", 30),
        ("run.toml --pace taken --out new", 2),
        ("run.toml --admit guess --out new", 2),
        *((f"run.toml {options}", code) for options, code in OPTIONS_OF_A_PEER),
    ],
    "join": [
        ("garbage", 2),
        (f"{DEAD} --out other", 11),
        ("KNOWN --out known", 30),
        ("KNOWN --out known --data wolves", 30),
        (f"{DEAD} --join-timeout 0.2 --no-lan --transport native --listen LOCAL --out new", 20),
        *((f"{DEAD} {options}", code) for options, code in OPTIONS_OF_A_PEER),
    ],
    "follow": [
        ("garbage", 2),
        (f"{DEAD} --out other", 11),
        (f"{DEAD} --out file/of", 50),
        (f"{DEAD} --listen nonsense --out new", 2),
        (f"{DEAD} --listen /ip4/127.0.0.1/tcp/BUSY --out new", 1),
        (f"{DEAD} --relay nonsense --out new", 2),
        (f"{DEAD} --every 0", 2),
        (f"{DEAD} --max-disk 5", 2),
        (f"{DEAD} --join-timeout 0.2 --no-lan --transport native --listen LOCAL --out new", 20),
    ],
    "relay": [
        ("--keep garbage --listen LOCAL", 2),
        ("--listen nonsense", 2),
        ("--listen /ip4/127.0.0.1/tcp/BUSY", 1),
        ("--announce nonsense --listen LOCAL", 2),
        ("--metrics nonsense --listen LOCAL", 2),
        ("--metrics 127.0.0.1:BUSY --listen LOCAL", 1),
        ("--identity file/key --listen LOCAL", 50),
        ("--max-rate 5mb", 2),
    ],
    "status": [("--out new", 2), ("--out broken", 2)],
    "peers": [("--out new", 2), ("--out broken", 2)],
    "logs": [("--out new", 2), ("--last 0", 2)],
    "doctor": [("garbage", 2), ("--bogus", 2)],
    "pause": [("--out new", 2), ("--out ended", 2), ("--for soon", 2)],
    "finish": [("--out new", 2), ("--out ended --wait 1", 2)],
    "schedule": [("night", 2), ("22:00-07:00 --out new", 2)],
    "set": [("max-uploads 5mbit", 2), ("max-upload 1kbit", 2), ("threads 0", 2), ("threads 2 --out new", 2)],
    "invite": [("--out new", 2), ("--out ended", 2), ("--relay nonsense", 2), ("--bogus", 2)],
    "resume": [("--out new", 2), ("--out ended", 2)],
    "leave": [("--out new", 2), ("--out ended --wait 1", 2)],
    "support": [("--out new", 2), ("--to file", 2), ("--bogus", 2)],
    "generate": [("new --prompt a", 2), ("--prompt a", 2)],
    "evaluate": [("new", 2)],
    "compare": [("new new", 2)],
    "dashboard": [("--bogus", 2), ("--port 99999", 2), ("--replay new", 2)],
    "watch": [("--bogus", 2), ("--out file", 2), ("--out taken", 2)],  # no test has a terminal
    "service": [("--bogus", 2), ("nothing", 2)],
    "service install": [("-- train", 2), ("-- join", 2), ("-- join garbage", 2), ("--name A -- relay", 2), ("", 2)],
    "service remove": [("--name nobody", 2), ("--name A/B", 2)],
    "service status": [("--bogus", 2)],
    "export": [
        ("new --to model", 2),
        ("damaged --to model", 50),
        ("damaged --to deep/er/model", 50),
        ("damaged --to photos", 2),
    ],
    "identity": [("nosuch", 2)],
    "identity show": [("--out new", 2), ("--out broken", 10)],
    "identity export": [("--out new", 2), ("--out broken", 10)],
    "identity import": [("absent.key --out new", 2), ("file --out new", 2), ("my.key --out broken", 10)],
    "optimizers": [("--bogus", 2)],
    "aggregation": [("--bogus", 2)],
    "compressors": [("--bogus", 2)],
    "feedback": [("--bogus", 2)],
    "bench": [("nosuch", 2)],
    "bench compressors": [("--rows 100", 2), ("--only nosuch", 2), ("--data absent", 2), ("--data noise", 30)],
    "bench transport": [("--bogus", 2)],
    "bench exchange": [("--peers 1", 2), ("--compressor nosuch", 10)],
    "lab": [
        ("absent.toml", 10),
        ("bad.toml", 10),
        ("noise", 10),
        ("study.toml --workers 0", 2),
        ("study.toml --out file", 2),
        ("study.toml --out file/of", 50),
        ("study.toml --out photos", 2),
        ("unfit.toml", 10),
    ],
    "simulate": [("absent.toml", 10), ("bad.toml", 10), ("run.toml --profile nosuch", 2)],
}
STUDY = """[study]
name = "law"
rounds = 1
learning_rates = [0.001]

[[method]]
name = "diloco"
preset = "diloco"
"""
CASES = [(name, typed, code) for name, rows in COMMANDS.items() for typed, code in rows]
FULL = [
    ("init new.toml", 50),
    ("init run.toml --force", 50),
    ("start run.toml --solo --out new", 50),
    ("start run.toml --no-lan --transport native --listen LOCAL --out new", 50),
    ("relay --listen LOCAL", 50),
    ("identity import my.key --out new", 50),
]

MADE_AND_REMOVED = (20, 50)  # a folder was there for a while: the time of change of the one above says so


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
    (world / "study.toml").write_text(STUDY)
    (world / "unfit.toml").write_text(STUDY.replace("rounds = 1", "tokens = 1"))
    (world / "bad.toml").write_text("[run]\nname = 3\n")
    for name in ("other", "known"):
        (world / name).mkdir()
    (world / "known/run.toml").write_text(foxes.to_toml())
    (world / "other/run.toml").write_text(terms.changed(run={"seed": 9}).to_toml())


def write_folders(world: Path) -> None:
    for name in ("taken", "ended", "broken", "damaged/checkpoints/round-000001", "photos", "demo/peer-0"):
        (world / name).mkdir(parents=True)
    write_status(world / "taken", Status(state="training"), ProcessInfo())
    write_status(world / "demo/peer-0", Status(state="training"), ProcessInfo())
    (world / "demo/.decentral-demo").touch()
    write_status(world / "ended", Status(state="done"), ProcessInfo(pid=2**22, created=1.0))
    (world / "broken/status.json").write_text("{")
    (world / "broken/identity.key").write_bytes(b"no key")
    (world / "broken/identity.key").chmod(0o600)
    (world / "damaged/checkpoints/round-000001/meta.json").write_text("{}")
    (world / "photos/cat.png").write_bytes(b"meow")
    (world / "my.key").write_text(Identity.load_or_create(world / "key").export_text())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home and working directory in one; what stands there before every refused command."""
    world = tmp_path / "world"
    world.mkdir()
    write_manifests(world)
    write_folders(world)
    (world / "file").write_text("a file")
    (world / "short").write_text("too short")
    (world / "noise").write_bytes(bytes(n * n * 31 % 251 ^ 0x80 for n in range(100_000)))
    (world / "foxes").write_bytes(b"the quick brown fox. " * 5000)
    (world / "wolves").write_bytes(b"the big bad wolf. " * 5000)
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(world))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return world


def type_in(world: Path, run: Run, monkeypatch: pytest.MonkeyPatch, name: str, typed: str, busy: int) -> Result:
    monkeypatch.chdir(world)
    known = load_manifest(world / "known/run.toml").digest
    given = (
        typed.replace("KNOWN", str(Invite(known, ())))
        .replace("BUSY", str(busy))
        .replace("LOCAL", "/ip4/127.0.0.1/tcp/0")
    )
    return run(*name.split(), *given.split())


def check(before: Tree, after: Tree, result: Result, code: int) -> None:
    assert result.exit_code == code, result.stderr
    assert "Traceback" not in result.output
    names = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    if code in MADE_AND_REMOVED:
        names.discard(".")
    assert not names, f"changed: {sorted(names)}"
    assert not list(Path(tempfile.gettempdir()).glob("decentral*"))


def test_every_command_has_refused_calls_here() -> None:
    assert set(COMMANDS) == set(EVERY_COMMAND)
    assert all(COMMANDS.values())


@pytest.mark.parametrize(("name", "typed", "code"), CASES, ids=[f"{name} {typed}"[:90] for name, typed, _ in CASES])
def test_a_refused_command_changes_no_file(
    world: Path, run: Run, monkeypatch: pytest.MonkeyPatch, busy: int, name: str, typed: str, code: int
) -> None:
    before = tree(world)
    result = type_in(world, run, monkeypatch, name, typed, busy)
    check(before, tree(world), result, code)


@pytest.mark.parametrize(("typed", "code"), FULL, ids=[typed for typed, _ in FULL])
def test_a_command_that_the_disk_refuses_changes_no_file(
    world: Path, run: Run, monkeypatch: pytest.MonkeyPatch, busy: int, typed: str, code: int
) -> None:
    """A limit of no byte a file stands for a full disk: names can be made, nothing can be written."""
    before = tree(world)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        result = type_in(world, run, monkeypatch, "", typed, busy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check(before, tree(world), result, code)


@pytest.mark.timeout(240)
def test_a_start_whose_peers_do_not_come_leaves_only_a_folder_in_which_it_can_be_started_again(
    world: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has voted there: that may not be taken back."""
    monkeypatch.chdir(world)
    before = tree(world)
    net = ["--no-lan", "--transport", "native", "--listen", "/ip4/127.0.0.1/tcp/0"]
    start = ["start", "run.toml", *net, "--out", "new"]
    typed = [sys.executable, "-m", "decentral", *start, "--require-peers", "2", "--join-timeout", "0.2"]
    refused = subprocess.run(typed, capture_output=True, text=True)  # a process of its own: it must have ended
    assert refused.returncode == 20, refused.stderr
    assert "then this one again in new, where it goes on as the same peer" in refused.stderr
    changed = {path for path, state in tree(world).items() if before.get(path) != state}
    assert {Path(path).parts[:1] for path in changed} <= {(), ("new",)}
    assert read_status(world / "new").state == "left"
    me = read_status(world / "new").peer
    assert run(*start, "--alone").exit_code == 0
    assert (read_status(world / "new").state, read_status(world / "new").peer) == ("done", me)
