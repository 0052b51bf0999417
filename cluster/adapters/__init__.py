"""LoRA adapters that change while the cluster serves. README.md lists the files."""

from tandem.cluster.commands.parser import CHANGE, command_of

COMMANDS = (
    command_of(
        "tandem.cluster.adapters.command",
        "adapters",
        "LoRA adapters of a running cluster: list, load and unload them",
        CHANGE,
    ),
)
