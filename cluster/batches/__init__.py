"""`tandem batch`: a file of requests answered. README.md lists the files."""

from tandem.cluster.commands.parser import LOOK, command_of

COMMANDS = (
    command_of(
        "tandem.cluster.batches.command", "batch", "have a file of requests answered when the cluster is idle", LOOK
    ),
)
