"""hivemind and libp2p bring protobuf messages of the same names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OURS = "import decentral.transport.pylibp2p.transport, libp2p.relay.circuit_v2, libp2p.kad_dht.kad_dht"
HIVEMIND = "import hivemind, hivemind.dht.node"
USED = """
from hivemind.proto import crypto_pb2 as theirs
from libp2p.crypto.pb import crypto_pb2 as own
key = own.PublicKey(key_type=own.KeyType.Ed25519, data=b"x" * 32)
assert theirs.PublicKey.FromString(key.SerializeToString()).data == key.data
"""


@pytest.mark.parametrize("first", [OURS, HIVEMIND], ids=["libp2p first", "hivemind first"])
def test_hivemind_and_libp2p_live_in_one_process(first: str, tmp_path: Path) -> None:
    code = "\n".join([first, *sorted({OURS, HIVEMIND} - {first}), USED])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
