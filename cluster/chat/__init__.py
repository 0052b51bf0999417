"""`tandem chat`: a conversation with a running server. README.md lists the files."""

from tandem.cluster.commands.parser import LOOK, command_of

COMMANDS = (command_of("tandem.cluster.chat.command", "chat", "talk to a running server", LOOK),)
