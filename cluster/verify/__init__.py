"""`tandem verify`: whether two servers give the same bits. README.md lists the files."""

from tandem.cluster.commands.parser import MEASURE, command_of

COMMANDS = (
    command_of(
        "tandem.cluster.verify.command",
        "verify",
        "ask two servers the same, and compare their answers bit by bit",
        MEASURE,
    ),
)
