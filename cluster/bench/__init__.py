"""`tandem bench`: one run of the load generator (loadgen/), from its flags to its table."""

from tandem.cluster.commands.parser import MEASURE, command_of

COMMANDS = (
    command_of(
        "tandem.cluster.bench.command", "bench", "measure any OpenAI-compatible server as its users feel it", MEASURE
    ),
)
