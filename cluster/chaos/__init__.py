"""`tandem chaos`: kills and stops processes of a cluster by a seeded plan, under the cluster's own traffic or generated
requests. README.md lists the files."""

from tandem.cluster.commands.parser import MEASURE, command_of

COMMANDS = (
    command_of(
        "tandem.cluster.chaos.command", "chaos", "kill and stop processes of a cluster, and report the effect", MEASURE
    ),
)
