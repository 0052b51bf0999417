"""`tandem doctor`: what this machine offers, what is wrong with it, and what to do about it. README.md lists the
files."""

from tandem.cluster.commands.parser import SERVE, command_of

COMMANDS = (
    command_of(
        "tandem.cluster.doctor.command", "doctor", "check this machine and say what to do about what is wrong", SERVE
    ),
)
