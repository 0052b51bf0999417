"""The command of this folder, as `tandem` finds it."""

from tandem.cluster.commands.parser import MEASURE, command_of

COMMANDS = (
    command_of(
        "tandem.cluster.chaos.command",
        "chaos",
        "kill and stop processes of a cluster, and report the effect",
        MEASURE,
    ),
)
