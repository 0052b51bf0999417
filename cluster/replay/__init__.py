"""`tandem replay`: shows a scheduler trace step by step. README.md lists the files."""

from tandem.cluster.commands.parser import LOOK, command_of

COMMANDS = (
    command_of("tandem.cluster.replay.command", "replay", "step through what a node's scheduler saw and decided", LOOK),
)
