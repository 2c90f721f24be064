"""Which transport a peer gets, and that the package works where hivemind is not."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.errors import ConfigError, UsageError
from decentral.swarm.identity import Identity
from decentral.transport.choice import default_kind, make_transport
from decentral.transport.daemon.transport import DaemonTransport
from decentral.transport.memory import MemoryNetwork
from decentral.transport.native.transport import NativeTransport
from decentral.transport.pylibp2p.transport import PyLibp2pTransport

# What a Windows machine has not: a run of every module that a peer imports, and one listening transport.
WITHOUT_DAEMON = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hivemind", "fcntl", "pwd", "grp"):
            raise ModuleNotFoundError(f"no {name} here", name=name)

import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "hivemind" else find(name, *more)
sys.meta_path.insert(0, Absent())

import anyio
import decentral.cli.train, decentral.peer, decentral.transport.choice
assert not [name for name in sys.modules if name.partition(".")[0] == "libp2p"]
from decentral.cli.checks import examine
from pathlib import Path

findings = {finding.what: finding for finding in examine(Path("."), None)}
assert findings["native"].verdict == "ok", findings
assert findings["transport"].detail.startswith("native"), findings
"""


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity.load_or_create(tmp_path / "identity.key")


def test_what_is_asked_for_is_what_one_gets(identity: Identity) -> None:
    assert isinstance(make_transport("daemon", identity, None), DaemonTransport)
    native = make_transport("native", identity, None)
    assert isinstance(native, NativeTransport)
    assert native.peer == identity.peer
    assert isinstance(make_transport("py-libp2p", identity, None), PyLibp2pTransport)
    own = MemoryNetwork().transport(identity.signer)
    assert make_transport(own, identity, None) is own
    with pytest.raises(ConfigError, match="there are daemon, native, py-libp2p"):
        make_transport("carrier pigeon", identity, None)


def test_the_daemon_is_preferred_where_there_is_one(identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_kind() == "daemon"
    assert isinstance(make_transport(None, identity, None), DaemonTransport)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert default_kind() == "native"
    assert isinstance(make_transport(None, identity, None), NativeTransport)


def test_a_transport_whose_package_is_missing_says_what_to_install(
    identity: Identity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install libp2p==0.8.1"):
        make_transport("py-libp2p", identity, None)
    run = tmp_path / "out"
    for kind, package in (("py-libp2p", "libp2p==0.8.1"), ("daemon", "'hivemind>=1.1.12'")):
        done = CliRunner().invoke(main, ["start", "run.toml", "--transport", kind, "--out", str(run)])
        assert done.exit_code == 2
        assert done.stderr.strip().endswith(f"pip install {package}")
        assert not run.exists()


def test_everything_a_peer_needs_is_there_without_hivemind_and_libp2p_comes_only_when_asked_for(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_DAEMON], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
