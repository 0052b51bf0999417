"""The command of this folder, as `tandem` finds it."""

from tandem.cluster.commands.parser import SERVE, command_of

COMMANDS = (
    command_of(
        "tandem.cluster.doctor.command",
        "doctor",
        "check this machine and say what to do about what is wrong",
        SERVE,
    ),
)
