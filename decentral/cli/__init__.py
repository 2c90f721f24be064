"""The command ``decentral``: words on the screen, nothing else.

One file per family of commands, imported when a command of it is named; torch is imported inside the
commands that need it. stdout carries results, stderr the log; ``--json`` on every command that reports;
exit codes are those of errors.py.
"""

import click

from decentral.cli.group import CommandGroup

COMMANDS = {
    "demo": "decentral.cli.commands.runs",
    "init": "decentral.cli.commands.init",
    "start": "decentral.cli.commands.runs",
    "join": "decentral.cli.commands.runs",
    "follow": "decentral.cli.commands.follow",
    "relay": "decentral.cli.commands.relay",
    "status": "decentral.cli.commands.look.status",
    "peers": "decentral.cli.commands.look.peers",
    "logs": "decentral.cli.commands.look.logs",
    "dashboard": "decentral.cli.commands.look.dashboard",
    "watch": "decentral.cli.commands.look.watch",
    "compare": "decentral.cli.commands.look.compare",
    "doctor": "decentral.cli.commands.look.doctor",
    "support": "decentral.cli.commands.look.support",
    "pause": "decentral.cli.commands.control",
    "resume": "decentral.cli.commands.control",
    "finish": "decentral.cli.commands.control",
    "leave": "decentral.cli.commands.control",
    "schedule": "decentral.cli.commands.control",
    "set": "decentral.cli.commands.control",
    "invite": "decentral.cli.commands.invite",
    "service": "decentral.cli.commands.service",
    "export": "decentral.cli.commands.model",
    "generate": "decentral.cli.commands.model",
    "evaluate": "decentral.cli.commands.model",
    "identity": "decentral.cli.commands.identity",
    "optimizers": "decentral.cli.commands.methods",
    "aggregation": "decentral.cli.commands.methods",
    "compressors": "decentral.cli.commands.methods",
    "feedback": "decentral.cli.commands.methods",
    "bench": "decentral.cli.commands.measure.bench",
    "simulate": "decentral.cli.commands.measure.simulate",
    "lab": "decentral.cli.commands.measure.lab",
}


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        import decentral

        click.echo(f"decentral {decentral.__version__}")
        context.exit()


@click.group(cls=CommandGroup, commands_in=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.option("--traceback", is_flag=True, help="Show where an unexpected error came from.")
@click.pass_context
def main(context: click.Context, traceback: bool) -> None:
    """Train one model together over ordinary internet links.

    \b
    $ decentral demo                                 four peers on this machine
    $ decentral init run.toml --preset sparseloco    the terms of a run
    $ decentral start run.toml                       its first peer; prints the invite
    $ decentral join INVITE                          everybody else
    """
    context.obj.traceback = traceback
