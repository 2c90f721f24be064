"""The greeting: what a peer says of its run before anything else is exchanged, and whether it is the same run, the
same model and the same version.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import anyio

from decentral.errors import ConfigError, DecentralError, ManifestMismatch, NotAdmitted, PayloadError, VersionError
from decentral.manifest import Manifest, differences, parse_manifest
from decentral.parameters import Schema
from decentral.swarm.admission import Admission
from decentral.swarm.directory import Directory
from decentral.swarm.leases import package_version
from decentral.transport import Transport
from decentral.transport.requests import request
from decentral.wire.keys import PeerId

HELLO = "/decentral/hello/1"
HELLO_LIMIT = 1 << 24  # bytes: manifest plus the schema of a model with 100,000 parameters
HELLO_TIMEOUT = 15.0  # s
WIRE_VERSION = 9  # 1: offers without age and summary; 2: frames that do not bind them; 3: anchors named by BLAKE2b;
# 4: beyond 21 members all of them vote, not a committee: the two would count votes differently; 5: what a leader, a
# promise or a farewell says is believed unsigned, and a claim counts for more; 6: EDiT weighs by the
# model's size, and CO2 is a round late; 7: a mean of any whole numbers among the
# buffers, and every small tensor compressed by itself; 8: leases that say nothing of a part of the model
_NOT_ADMITTED = "the run admits by token, and this invite has none or another; ask a member for its invite of today"


def refusal() -> bytes:
    """Return the answer to a stranger of a run that admits by token: nothing of the run."""
    return json.dumps({"wire": WIRE_VERSION, "version": package_version(), "refused": True}).encode()


def greeting(manifest: Manifest, schema: Schema, age: float, *, over: bool = False) -> bytes:
    """Return this peer's answer; ``age``: seconds since the run began; ``over``: whether it has its last commit."""
    answer = {
        "wire": WIRE_VERSION,
        "version": package_version(),
        "manifest": manifest.to_toml(),
        "schema": schema.to_json(),
        "age": round(age, 1),
        "over": over,
    }
    return json.dumps(answer).encode()


@dataclass(frozen=True, slots=True)
class Hello:
    """The greeting of a peer: its run, before anything else is exchanged."""

    version: str
    manifest: Manifest
    schema: Schema
    age: float  # s
    over: bool = False  # the peer has the run's last commit, as it says; peers of version 0.1 never say so

    @classmethod
    def from_bytes(cls, data: bytes) -> Hello:
        """Read a peer's answer. Raises VersionError, NotAdmitted, PayloadError."""
        try:
            found = json.loads(data)
            _check_wire(int(found["wire"]), theirs := _visible(str(found["version"])[:32]))
            if found.get("refused") is True:
                raise NotAdmitted(_NOT_ADMITTED)
            over = found.get("over") is True
            text, schema, age = str(found["manifest"]), str(found["schema"]), float(found["age"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            reason = type(error).__name__
            raise PayloadError(f"greeting that does not parse ({reason}); use another peer") from None
        try:
            manifest = parse_manifest(text)
        except ConfigError as error:
            raise PayloadError(f"the peer's manifest is none: {error}") from error
        return cls(theirs, manifest, Schema.from_json(schema), age if 0 <= age < 1e9 else 0.0, over)


async def ask_hello(transport: Transport, peer: PeerId, admission: Admission | None) -> Hello:
    """Ask a peer for the terms of its run. Raises VersionError, NotAdmitted, PayloadError, TransportError."""
    proof = b"" if admission is None else admission.proof(peer)
    return Hello.from_bytes(await request(transport, peer, HELLO, proof, limit=HELLO_LIMIT, timeout=HELLO_TIMEOUT))


def _check_wire(wire: int, theirs: str) -> None:
    """Raise VersionError before anything else is read: an answer of another version may have other fields."""
    if wire != WIRE_VERSION:
        raise VersionError(
            f"the peer speaks wire version {wire} (decentral {theirs}), this is {WIRE_VERSION} (decentral "
            f"{package_version()}); install decentral {theirs}, or ask who gave you the invite for theirs"
        )


def _visible(text: str) -> str:
    """Return a stranger's word, safe on a terminal."""
    return "".join(c if "!" <= c <= "~" else "?" for c in text)


def check_terms(manifest: Manifest, schema: Schema, hello: Hello) -> None:
    """Raise ManifestMismatch with a readable difference unless both mean the same run and the same model."""
    if hello.manifest.digest != manifest.digest:
        terms = "; ".join(differences(manifest, hello.manifest)[:4])
        raise ManifestMismatch(f"the peer's run has other terms: {terms}; join with an invite of this very run")
    if hello.schema.digest != schema.digest:
        raise ManifestMismatch(
            f"the model differs from the run's: {model_difference(schema, hello.schema)}; "
            "what counts is what its first peer built: the manifest's model, or the one of its own script"
        )


def model_difference(here: Schema, there: Schema) -> str:
    """Return the first differences of two models, on one line."""
    found = here.describe_difference(there)
    more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
    return f"{'; '.join(found[:3])}{more}"


# ---- coming back after an upgrade ----
#
# A newcomer learns which version the others speak before it fetches anything. A peer that resumes asks nobody for the
# run's terms, because it has them: after an upgrade it would train on beside a swarm that drops its frames. So it asks
# those that are here, a few bytes each. One that lies cannot send it away: it goes only when nobody who answered speaks
# its version.

_ASKED = 3  # peers
_AGAIN = 2.0  # s between two looks for somebody who answers


async def check_version(directory: Directory, admission: Admission | None) -> None:
    """Return once somebody speaks this version. Raises VersionError when all who answer speak others."""
    while True:
        refused = None
        for peer in list(directory.live())[:_ASKED]:
            try:
                await ask_hello(directory.transport, peer, admission)
                return
            except VersionError as error:
                refused = error
            except DecentralError:
                continue  # it is busy, or gone, or breaks a rule: another one is asked
        if refused is not None:
            raise refused
        await anyio.sleep(_AGAIN)
