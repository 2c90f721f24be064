import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import decentral

HEAVY = {
    *("torch", "hivemind", "transformers", "accelerate", "matplotlib", "numpy", "pydantic", "psutil", "rich"),
    "zeroconf",
}


def loaded_by(program: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after ``program``."""
    script = f"import sys\n{program}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in done.stdout.split("\n")[-2].split()}


def test_importing_the_package_and_asking_any_command_for_help_loads_nothing_heavy() -> None:
    program = (
        "import decentral\ndecentral.DecentralError\ndecentral.__version__\n"
        "from click.testing import CliRunner\nfrom click import Context\nfrom decentral.cli import main\n"
        "for name in ['--help', *main.list_commands(Context(main))]:\n"
        "    assert CliRunner().invoke(main, [name, '--help']).exit_code == 0, name"
    )
    assert not loaded_by(program) & HEAVY


def test_training_the_built_in_model_loads_nothing_of_an_extra() -> None:
    loaded = loaded_by(
        "import decentral.cli.train, decentral.cli.demo, decentral.cli.model, decentral.tasks.trained_model"
    )
    assert "torch" in loaded
    assert not loaded & {"transformers", "tokenizers", "matplotlib", "sklearn", "hivemind", "trio"}


def test_every_public_name_exists_and_is_documented() -> None:
    for name in decentral.__all__:
        value = getattr(decentral, name)
        assert name in dir(decentral)
        if name == "__version__":
            assert isinstance(value, str)
            continue
        assert inspect.getdoc(value), f"decentral.{name} has no docstring"


def test_every_method_of_a_peer_is_documented() -> None:
    for name, value in inspect.getmembers(decentral.Peer):
        if not name.startswith("_"):
            assert inspect.getdoc(value), f"Peer.{name} has no docstring"


def test_the_version_is_that_of_the_project(root: Path) -> None:
    assert f'version = "{decentral.__version__}"' in (root / "pyproject.toml").read_text(encoding="utf-8")


def test_every_module_says_what_it_is(root: Path) -> None:
    for path in sorted((root / "decentral").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def processor_seconds_of_help() -> float:
    """User and system time of ``decentral --help``; unlike the wall time it does not depend on other programs."""
    process = subprocess.Popen([sys.executable, "-m", "decentral", "--help"], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_help_is_there_in_a_fifth_of_a_second() -> None:
    assert min(processor_seconds_of_help() for _ in range(3)) < 0.2
