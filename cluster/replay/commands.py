"""The command of this folder, as `tandem` finds it."""

from tandem.cluster.commands.parser import LOOK, command_of

COMMANDS = (
    command_of(
        "tandem.cluster.replay.command",
        "replay",
        "step through what a node's scheduler saw and decided",
        LOOK,
    ),
)
