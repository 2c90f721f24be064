"""Files for operators: every number that a panel or an alert asks for exists, every command of a container is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import yaml
from click import Context

from decentral.cli import main
from decentral.cli.relaying import relay_numbers
from decentral.observe.diagnostics import NAMES
from decentral.observe.metrics import exposition, peer_numbers
from decentral.observe.status import Status
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.transport.protocols.circuit import RelayLimits
from decentral.wire.keys import Signer

ROOT = Path(__file__).parents[2]
DEPLOY, PAGE = ROOT / "deploy", (ROOT / "docs/operations.md").read_text(encoding="utf-8")
_OURS = re.compile(r"\bdecentral_\w+")


@pytest.fixture(scope="module")
def told() -> set[str]:
    """The names of everything that a peer and a relay ever tell."""
    full = Status(loss=1.0, held_out_loss=1.0, disk_free=1, checkpoint_nbytes=1, diagnostics=dict.fromkeys(NAMES, 1.0))
    relay = NativeTransport(Signer.generate(), options=NativeOptions(relay=RelayLimits())).relay
    assert relay is not None

    async def of_a_relay() -> bytes:  # its clock is the loop's
        return exposition(lambda: relay_numbers(relay))

    texts = (exposition(lambda: peer_numbers(full, alive=True)), anyio.run(of_a_relay))
    return {re.split(r"[ {]", line)[0] for text in texts for line in text.decode().splitlines() if line[:1] != "#"} | {
        "decentral_relay_refused_total"  # none was
    }


def alerts() -> list[dict[str, str]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text(encoding="utf-8"))["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, object]]:
    return list(json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))["panels"])


def test_every_panel_shows_numbers_that_there_are(told: set[str]) -> None:
    for panel in panels():
        asked = set(_OURS.findall(json.dumps(panel["targets"])))
        assert asked, panel["title"]
        assert asked <= told, panel["title"]


def test_no_two_panels_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert isinstance(place, dict)
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken
        assert all(x < 24 for x, _ in cells)
        taken |= cells


def test_every_alert_asks_for_numbers_that_there_are_and_is_explained(told: set[str]) -> None:
    for rule in alerts():
        assert set(_OURS.findall(rule["expr"])) <= told, rule["alert"]
        assert f"`{rule['alert']}`" in PAGE


def commands_of_containers() -> Iterator[tuple[str, list[str]]]:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    for name, service in services.items():
        yield name, [word.replace("${INVITE:-}", "INVITE") for word in service["command"]]


@pytest.mark.parametrize(("name", "words"), list(commands_of_containers()))
def test_what_a_container_runs_is_a_command_with_options_that_it_has(name: str, words: list[str]) -> None:
    command = main.get_command(Context(main), words[0])
    assert command is not None
    command.make_context(words[0], words[1:], parent=Context(main))


def test_an_image_takes_in_what_an_install_needs() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()}
    assert copied >= {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "decentral"}
    assert all((ROOT / name).exists() for name in copied)
    assert text.count("USER volunteer") == text.count("ENTRYPOINT") == text.count("HEALTHCHECK") == 2
