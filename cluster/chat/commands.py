"""The command of this folder, as `tandem` finds it."""

from tandem.cluster.commands.parser import LOOK, command_of

COMMANDS = (command_of("tandem.cluster.chat.command", "chat", "talk to a running server", LOOK),)
