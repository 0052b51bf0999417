"""The parser of subcommands. It answers an unknown option with the one that was probably meant."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from typing import Any

# Every command, by what one wants.
GROUPS = {
    "serve": ("serve", "init", "config", "models", "doctor", "down"),
    "use and look": ("chat", "status", "top", "trace", "why", "logs", "replay"),
    "change a running cluster": (
        "apply", "scale", "drain", "evacuate", "role", "adapters", "pause", "resume", "reset-cache",
    ),
    "measure and plan": ("bench", "profile", "simulate", "plan", "chaos"),
    "the shell": ("completion",),
}  # fmt: skip


class _NamesTheCommand(argparse.ArgumentParser):
    """Answers an unknown command with the one that was probably meant, instead of with all of them."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            from tandem.cluster.setting_names import did_you_mean

            hint = did_you_mean(str(value), action.choices) or f"; `{self.prog} --help` lists them"
            self.error(f"there is no command {value!r}{hint}")
        super()._check_value(action, value)


class CommandsParser(_NamesTheCommand):
    """The parser of `tandem` itself. Its help groups the commands."""

    def format_help(self) -> str:
        (commands,) = (each for each in self._actions if isinstance(each, argparse._SubParsersAction))
        helps = {each.dest: each.help or "" for each in commands._choices_actions}
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("options")
        formatter.add_arguments([each for each in self._actions if each is not commands])
        formatter.end_section()
        said = [formatter.format_help()]
        for title, names in GROUPS.items():
            lines = [f"    {name:<14}{helps[name]}" for name in names if name in helps]
            said.append("\n".join([f"{title}:", *lines]))
        return "\n\n".join(part.rstrip("\n") for part in said) + "\n"


class CommandParser(_NamesTheCommand):
    """Adds its arguments only when its command is used, because that can take imports."""

    def __init__(
        self, *args: Any, describe: Callable[[argparse.ArgumentParser], None] | None = None, **kwargs: Any
    ) -> None:
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
        return parsed, unknown

    def _meant(self, word: str) -> str:
        from tandem.cluster.setting_names import did_you_mean

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
        print(f"tandem {of('tandem-serve')} (Python {platform.python_version()}, {parts})")
        parser.exit()
