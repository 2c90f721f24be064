"""The command ``decentral``: words on the screen, nothing else.

One file per family of commands, imported when a command of it is named; torch is imported inside the
commands that need it. stdout carries results, stderr the log; ``--json`` on every command that reports;
exit codes are those of errors.py. Extras bring their commands by entry points.
"""

import click

from decentral.cli.group import CommandGroup

COMMANDS = {
    "demo": "decentral.cli.runs",
    "init": "decentral.cli.init",
    "start": "decentral.cli.runs",
    "join": "decentral.cli.runs",
    "follow": "decentral.cli.follow",
    "relay": "decentral.cli.relay",
    "status": "decentral.cli.look",
    "peers": "decentral.cli.look",
    "logs": "decentral.cli.look",
    "compare": "decentral.cli.look",
    "doctor": "decentral.cli.look",
    "support": "decentral.cli.look",
    "pause": "decentral.cli.control",
    "resume": "decentral.cli.control",
    "finish": "decentral.cli.control",
    "leave": "decentral.cli.control",
    "schedule": "decentral.cli.control",
    "set": "decentral.cli.control",
    "invite": "decentral.cli.invite",
    "service": "decentral.cli.service",
    "export": "decentral.cli.model",
    "generate": "decentral.cli.model",
    "evaluate": "decentral.cli.model",
    "identity": "decentral.cli.identity",
    "optimizers": "decentral.cli.methods",
    "aggregation": "decentral.cli.methods",
    "compressors": "decentral.cli.methods",
    "feedback": "decentral.cli.methods",
}
HEADINGS = {  # of --help, most used first; the core knows the places of our extras' commands, and not their modules
    "Run": ("demo", "init", "start", "join", "invite", "follow", "relay", "service", "identity"),
    "Look": ("status", "watch", "dashboard", "peers", "logs", "doctor", "compare", "support"),
    "Steer": ("pause", "resume", "leave", "finish", "set", "schedule"),
    "Model": ("export", "evaluate", "generate"),
    "Research": ("tune", "optimizers", "compressors", "aggregation", "feedback", "lab", "simulate", "bench"),
}


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        import decentral

        click.echo(f"decentral {decentral.__version__}")
        context.exit()


@click.group(
    cls=CommandGroup,
    commands_in=COMMANDS,
    added_by="decentral.commands",
    headings=HEADINGS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
