"""The table of commands, and their parsers. They answer an unknown word or option with the one that was probably meant."""

from __future__ import annotations

import argparse
import importlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# What a command is for, in the order of `tandem --help`.
GROUPS = SERVE, LOOK, CHANGE, MEASURE, SHELL = (
    "serve", "use and look", "change a running cluster", "measure and plan", "the shell",
)  # fmt: skip

Describe = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Command:
    """A row of the table of commands. The module that has it is imported whenever `tandem` starts, so its own imports happen in these
    functions."""

    name: str
    help: str
    group: str
    describe: Describe  # adds its options
    run: Run  # returns the exit status
    epilog: str | None = None


def command_of(module: str, name: str, help: str, group: str) -> Command:
    """The command of a module that has `add_arguments` and `run`, and that is imported when the command is used."""

    def found() -> Any:
        return importlib.import_module(module)

    return Command(
        name, help, group, lambda parser: found().add_arguments(parser), lambda options: found().run(options)
    )


def described(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with its arguments."""
    return parser.described() if isinstance(parser, CommandParser) else parser


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """What each flag of a parser does; several may do the same."""
    return parser._option_string_actions


class _NamesTheCommand(argparse.ArgumentParser):
    """Answers an unknown command with the one that was probably meant, instead of with all of them."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            from tandem.cluster.settings.names import did_you_mean

            hint = did_you_mean(str(value), action.choices) or f"; `{self.prog} --help` lists them"
            self.error(f"there is no command {value!r}{hint}")
        super()._check_value(action, value)


class CommandsParser(_NamesTheCommand):
    """The parser of `tandem` itself. Its help groups the commands."""

    def __init__(self, rows: Sequence[Command], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._rows = rows
        commands = self._commands = self.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)
        for row in rows:
            command = commands.add_parser(row.name, help=row.help, epilog=row.epilog, describe=row.describe)
            command.set_defaults(run=row.run)

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments([each for each in self._actions if each is not self._commands])
        formatter.end_section()
        said = [formatter.format_help()]
        for group in GROUPS:
            lines = [f"    {row.name:<14}{row.help}" for row in self._rows if row.group == group]
            if lines:
                said.append("\n".join([f"{group}:", *lines]))
        return "\n\n".join(part.rstrip("\n") for part in said) + "\n"


class CommandParser(_NamesTheCommand):
    """Adds its arguments only when its command is used, because that can take imports."""

    def __init__(self, *args: Any, describe: Describe | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._describe = describe

    def described(self) -> CommandParser:
        if self._describe is not None:
            describe, self._describe = self._describe, None
            describe(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = super(CommandParser, self.described()).parse_known_args(args, namespace)
        for word in unknown:
            if word.startswith("-"):
                self.error(f"there is no {word}{self._meant(word)}")
        if unknown:
            self.error(f"one word too many: {unknown[0]!r}")
        return parsed, unknown

    def _meant(self, word: str) -> str:
        from tandem.cluster.settings.names import did_you_mean

        meant = word.partition("=")[0].replace("_", "-")
        if meant in self._option_string_actions:  # vLLM accepts both spellings
            return f"; did you mean {meant}?"
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        names = {name for action in shown for name in action.option_strings if name.startswith("--")}
        hint = did_you_mean(meant, names)
        if not hint and "--set" in names:
            hint = ": `--set SETTING=VALUE` reaches every setting, and `tandem init` writes a file that explains them"
        return hint


class VersionAction(argparse.Action):
    """Prints the versions of Tandem and its main dependencies without importing them."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        def of(name: str) -> str:
            try:
                return version(name)
            except PackageNotFoundError:
                return "not installed"

        parts = ", ".join(f"{name} {of(name)}" for name in ("ray", "torch", "transformers", "nixl"))
        print(f"tandem {of('tandem-serve')} (Python {platform.python_version()}, {parts})", flush=True)
        parser.exit()
