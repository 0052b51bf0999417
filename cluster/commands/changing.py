"""The commands that change a running cluster: their options, and what they print."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.base.flags import adder
from tandem.cluster.commands.options import add_address, add_operated, add_router, target_of
from tandem.cluster.commands.output import add_output, print_found
from tandem.cluster.commands.parser import CHANGE, Command, Run
from tandem.cluster.commands.setting_options import add_settings, read_settings

if TYPE_CHECKING:
    from tandem.cluster.wings import RolloutJudge

_BUILT_IN = Path()


def _describe_apply(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("file", "FILE", str, "the same as --config FILE", nargs="?")
    add("--dry-run", None, False, "show what would change, and change nothing")
    add("--no-wait", None, False, "return when the change is recorded, not when it is done")
    add("--back", None, False, "take back the rollout that is under way")
    parser.add_argument(
        "--verify", nargs="?", type=Path, const=_BUILT_IN, metavar="REQUESTS",
        help="ask requests before and during the rollout, and take it back at the first answer with other bits; of a file, one JSON object "
        "a line (default: a built-in set)",
    )  # fmt: skip
    add_settings(parser)
    add_address(parser, with_name=False)
    add_router(parser)
    add_output(parser)


def _apply(options: argparse.Namespace) -> int:
    from tandem.base.errors import ConfigurationError
    from tandem.cluster.commands.apply import apply, go_back
    from tandem.cluster.commands.foretelling import as_json

    if options.back:
        given = {
            "FILE": options.file,
            "--dry-run": options.dry_run,
            "--no-wait": options.no_wait,
            "--verify": options.verify,
        }
        for name in (name for name, value in given.items() if value):
            raise ConfigurationError(
                f"--back takes back what is under way, and {name} is about a new change: leave one out"
            )
        done = go_back(target_of(options))
        print_found(options, {"done": done})
        return 0 if done else 1
    if options.file is not None:
        if options.config is not None:
            raise ConfigurationError("FILE and --config FILE name two files: leave one out")
        options.config = options.file
    config = read_settings(options).config
    # A router belongs to one deployment, so its name is not needed.
    options.name = config.name if options.url is None else None
    judge = _judge(options)
    try:
        applied = apply(config, target_of(options), dry_run=options.dry_run, wait=not options.no_wait, judge=judge)
    finally:
        if judge is not None:
            judge.close()
    print_found(options, {"change": applied.change, "done": applied.done, **as_json(applied.expected)})
    return 0 if applied.done else 1


def _judge(options: argparse.Namespace) -> RolloutJudge | None:
    from tandem.base.errors import ConfigurationError
    from tandem.cluster.commands.router_url import choose_url
    from tandem.cluster.wings import rollout_judge

    if options.verify is None or options.dry_run:
        return None
    if options.no_wait:
        raise ConfigurationError("--verify and --no-wait contradict each other: leave one out")
    return rollout_judge(choose_url(options.url), None if options.verify == _BUILT_IN else options.verify)


def _describe_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sizes", nargs="+", metavar="POOL=N", help="such as prefill=3 decode=2")
    add_operated(parser)


def _describe_drain(parser: argparse.ArgumentParser) -> None:
    adder(parser)("nodes", "NODE", str, "a node's name, or the address of its machine", nargs="+")
    _add_limit(parser)
    add_operated(parser)


def _describe_evacuate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("machine", metavar="ADDRESS")
    _add_limit(parser)
    add_operated(parser)


def _add_limit(parser: argparse.ArgumentParser) -> None:
    adder(parser)("--timeout", "S", float, "seconds that nodes may take to finish their requests (default 60)")


def _describe_role(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE")
    parser.add_argument("role", metavar="ROLE", help="prefill, decode or aggregated")
    add_operated(parser)


def _describe_names(parser: argparse.ArgumentParser) -> None:
    which = "a pool (prefill, decode, aggregated, encode) or a node; none: all"
    adder(parser)("names", "NAME", str, which, nargs="*")
    add_operated(parser)


def _order(name: str) -> Run:
    """The function of this name in `operate`, as a command."""

    def run(options: argparse.Namespace) -> int:
        from tandem.cluster.commands import operate

        printed: dict[str, Any] = getattr(operate, name)(target_of(options), options)
        print_found(options, printed)
        return 0 if all(printed.get("finished", {}).values()) else 1

    return run


COMMANDS = (
    Command("apply", "give a running cluster another configuration, while it serves", CHANGE, _describe_apply, _apply),
    Command("scale", "change how many nodes the pools have", CHANGE, _describe_scale, _order("scale")),
    Command("drain", "let nodes finish their requests, then end them", CHANGE, _describe_drain, _order("drain")),
    Command("evacuate", "empty a machine that is about to go away; other machines take over", CHANGE, _describe_evacuate, _order("evacuate")),
    Command("role", "move a node to another pool, with the weights that it has loaded", CHANGE, _describe_role, _order("change_role")),
    Command("pause", "hold back new requests; running ones go on", CHANGE, _describe_names, _order("pause")),
    Command("resume", "end a pause", CHANGE, _describe_names, _order("resume")),
    Command(
        "reset-cache", "empty prefix caches, in every tier; running requests keep their blocks", CHANGE, _describe_names,
        _order("reset_cache"),
    ),
)  # fmt: skip
