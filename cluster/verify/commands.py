"""The command of this folder, as `tandem` finds it."""

from tandem.cluster.commands.parser import MEASURE, command_of

COMMANDS = (
    command_of(
        "tandem.cluster.verify.command",
        "verify",
        "ask two servers the same, and compare their answers bit by bit",
        MEASURE,
    ),
)
