"""The `tandem` command. A subcommand's imports happen when it runs, so that help and usage errors are instant."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.cluster import subcommands
from tandem.cluster.commands.output import add_output
from tandem.cluster.commands.parser import CommandParser, CommandsParser, VersionAction
from tandem.cluster.commands.setting_options import add_settings


def main(arguments: Sequence[str] | None = None) -> int:
    from tandem.base.errors import TandemError

    parser = make_parser()
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if words[0] == "completion" and words[2:3] == ["--words"]:
        # Not by the parser: what is typed may be what it would take for its own, such as a lone `--`.
        options = argparse.Namespace(verbose=False, run=lambda _: _complete(parser, words[3:]))
    else:
        options = parser.parse_args(words)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character must not end the command
            stream.reconfigure(errors="replace")
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.ERROR,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        status: int = options.run(options)
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone. Without this, the interpreter would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _describe_bench(parser: argparse.ArgumentParser) -> None:
    from tandem.loadgen.options import add_arguments

    add_arguments(parser)
    add_output(parser)


def _describe_chaos(parser: argparse.ArgumentParser) -> None:
    from tandem.cluster.chaos.command import add_arguments
    from tandem.cluster.commands.operate_options import add_address

    add_address(parser)
    add_arguments(parser)


def _describe_replay(parser: argparse.ArgumentParser) -> None:
    from tandem.cluster.replay.command import add_arguments

    add_arguments(parser)


def _describe_why(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.options import add_costs

    parser.add_argument("request", metavar="REQUEST_ID", help="its id, or its answer's")
    _add_server(parser)
    add_costs(parser, "also simulate the request in other clusters, with these costs", required=False)
    add_settings(parser, serves=False)
    add_output(parser)


def _describe_simulate(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.command import add_arguments

    add_arguments(parser)
    add_settings(parser, serves=False)
    add_output(parser)


def _describe_profile(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.profile_command import add_arguments

    add_arguments(parser)
    add_output(parser)


def _describe_plan(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.plan_command import add_arguments

    add_arguments(parser)
    add_settings(parser, serves=False)
    add_output(parser)


def make_parser() -> argparse.ArgumentParser:
    from tandem.cluster.commands.operate_options import add_address, add_commands, add_router

    parser = CommandsParser(
        prog="tandem", description="Serve language models with prefill and decode on separate machines."
    )
    parser.add_argument("--verbose", action="store_true", help="log everything to the terminal")
    parser.add_argument("--version", action=VersionAction, nargs=0, help="print the versions of all parts")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=CommandParser
    )

    serve = commands.add_parser(
        "serve",
        help="serve a model, on this machine or on a Ray cluster",
        epilog="vLLM's and SGLang's commonest flags are understood, or answered: docs/from-vllm.md",
    )
    serve.add_argument("served", nargs="?", metavar="MODEL", help="the model, as with --model")
    add_settings(serve)
    where = serve.add_argument_group("where it runs")
    where.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="a Ray cluster's head, or auto (default: start a Ray of its own)",
    )
    where.add_argument(
        "--detach", action="store_true", help="return when the cluster answers; it runs until `tandem down`"
    )
    add_output(serve)
    serve.set_defaults(run=subcommands.run_serve)

    apply = commands.add_parser("apply", help="give a running cluster another configuration, while it serves")
    apply.add_argument("file", nargs="?", metavar="FILE", help="the same as --config FILE")
    apply.add_argument("--dry-run", action="store_true", help="show what would change, and change nothing")
    apply.add_argument(
        "--no-wait", action="store_true", help="return when the change is recorded, not when it is done"
    )
    apply.add_argument("--back", action="store_true", help="take back the rollout that is under way")
    add_settings(apply)
    add_address(apply, with_name=False)
    add_router(apply)
    add_output(apply)
    apply.set_defaults(run=subcommands.run_apply)

    chat = commands.add_parser("chat", help="talk to a running server")
    _add_server(chat)
    chat.add_argument("--system", metavar="TEXT", help="the system message before the conversation")
    chat.add_argument("--max-tokens", metavar="N", type=int, help="longest reply")
    # Lower than the API's 1.0, at which small models lose the thread.
    chat.add_argument(
        "--temperature", metavar="T", type=float, default=0.3, help="0 always says the same (default 0.3)"
    )
    chat.set_defaults(run=subcommands.run_chat)

    add_commands(commands)

    trace = commands.add_parser("trace", help="where one request's time went")
    trace.add_argument(
        "request",
        nargs="?",
        metavar="REQUEST_ID",
        help="its id, or its answer's (default: list the last ones)",
    )
    _add_server(trace)
    trace.add_argument("--picture", type=Path, metavar="FILE", help="a picture too, .png or .svg")
    trace.add_argument("--json", type=Path, metavar="FILE", help="the whole record; - for standard output")
    add_output(trace)
    trace.set_defaults(run=subcommands.run_trace)

    why = commands.add_parser(
        "why", help="every millisecond of one request: what it waited for", describe=_describe_why
    )
    why.set_defaults(run=subcommands.run_why)

    top = commands.add_parser("top", help="the cluster as it is now, and its slowest requests by cause")
    _add_server(top)
    top.add_argument("--once", action="store_true", help="print it once, then end")
    top.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="seconds between two updates (default 2)"
    )
    add_output(top)
    top.set_defaults(run=subcommands.run_top)

    replay = commands.add_parser(
        "replay", help="step through what a node's scheduler saw and decided", describe=_describe_replay
    )
    replay.set_defaults(run=subcommands.run_replay)

    doctor = commands.add_parser("doctor", help="check this machine and say what to do about what is wrong")
    add_settings(doctor)
    doctor.add_argument(
        "--reach",
        action="append",
        default=[],
        metavar="HOST",
        help="also check that this machine reaches the ports of HOST, another machine of the cluster (repeatable)",
    )
    add_output(doctor)
    doctor.set_defaults(run=subcommands.run_doctor)

    bench = commands.add_parser(
        "bench", help="measure any OpenAI-compatible server as its users feel it", describe=_describe_bench
    )
    bench.set_defaults(run=subcommands.run_bench)

    chaos = commands.add_parser(
        "chaos",
        help="kill and stop processes of a cluster, and report the effect",
        describe=_describe_chaos,
    )
    chaos.set_defaults(run=subcommands.run_chaos)

    profile = commands.add_parser(
        "profile", help="measure what a node's steps take, for `tandem simulate`", describe=_describe_profile
    )
    profile.set_defaults(run=subcommands.run_profile)

    simulate = commands.add_parser(
        "simulate", help="simulate how a cluster would serve given traffic", describe=_describe_simulate
    )
    simulate.set_defaults(run=subcommands.run_simulate)

    plan = commands.add_parser(
        "plan",
        help="how many nodes of each role given traffic needs, and what they cost",
        describe=_describe_plan,
    )
    plan.set_defaults(run=subcommands.run_plan)

    config = commands.add_parser("config", help="print the configuration that results from these settings")
    add_settings(config)
    config.add_argument(
        "--schema", action="store_true", help="print the JSON schema of tandem.yaml instead, for editors"
    )
    add_output(config)
    config.set_defaults(run=subcommands.run_config)

    models = commands.add_parser("models", help="models on this machine")
    actions = models.add_subparsers(title="actions", metavar="ACTION", required=True)
    fetch = actions.add_parser("fetch", help="fetch a model now, so that serving starts at once later")
    fetch.add_argument("name", nargs="?", default="smollm2", metavar="MODEL")
    add_output(fetch)
    fetch.set_defaults(run=subcommands.run_fetch)
    listed = actions.add_parser("list", help="the models that were fetched, and their size")
    add_output(listed)
    listed.set_defaults(run=subcommands.run_list)
    remove = actions.add_parser("rm", help="delete fetched models from this machine")
    remove.add_argument("names", nargs="+", metavar="MODEL", help="as `tandem models list` names them")
    add_output(remove)
    remove.set_defaults(run=subcommands.run_remove)

    init = commands.add_parser(
        "init", help="write a tandem.yaml that explains every setting, and a cluster's files"
    )
    init.add_argument("folder", nargs="?", type=Path, default=Path(), help="where to write (default: here)")
    init.add_argument(
        "--cluster",
        choices=("static", "aws", "gcp", "kuberay"),
        help="also write a cluster's files: for your own machines, a cloud, or Kubernetes",
    )
    add_settings(init)
    add_output(init)
    init.set_defaults(run=subcommands.run_init)

    completion = commands.add_parser("completion", help="print a shell's completion script")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(run=_print_completion)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="where the router listens (default: the `tandem serve` that runs on this machine, whatever its port)",
    )


def _print_completion(options: argparse.Namespace) -> int:
    from tandem.cluster.completion import SCRIPTS

    print(SCRIPTS[options.shell], end="")
    return 0


def _complete(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    from tandem.cluster.completion import complete

    print("\n".join(complete(parser, words)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
