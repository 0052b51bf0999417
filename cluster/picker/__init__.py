"""`tandem picker`: chooses routers for a Kubernetes gateway. README.md lists the files."""

from tandem.cluster.commands.parser import SERVE, command_of

COMMANDS = (
    command_of("tandem.cluster.picker.command", "picker", "tell a Kubernetes gateway which router to ask", SERVE),
)
