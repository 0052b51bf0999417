"""The `tandem` command. What a subcommand needs is imported when it runs, so that help and mistakes are instant."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cluster.commands.output import add_output, print_json, wants_json
from tandem.cluster.commands.parser import CommandParser, VersionAction
from tandem.cluster.commands.setting_options import add_settings, flags_of, read_settings

if TYPE_CHECKING:
    from tandem.cluster.config import TandemConfig

DEFAULT_URL = "http://127.0.0.1:8000"


def main(arguments: Sequence[str] | None = None) -> int:
    from tandem.wire.errors import TandemError

    options = make_parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to end
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
        # The reader of our output has gone; the interpreter must not find out again when it ends.
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
    add_costs(parser, "also say what it would have taken in other clusters, from these", required=False)
    add_settings(parser)
    add_output(parser)


def _describe_simulate(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.command import add_arguments

    add_arguments(parser)
    add_settings(parser)
    add_output(parser)


def _describe_profile(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.profile_command import add_arguments

    add_arguments(parser)
    add_output(parser)


def _describe_plan(parser: argparse.ArgumentParser) -> None:
    from tandem.simulator.plan_command import add_arguments

    add_arguments(parser)
    add_settings(parser)
    add_output(parser)


def make_parser() -> argparse.ArgumentParser:
    from tandem.cluster.commands.operate_options import add_address, add_commands, add_router

    parser = argparse.ArgumentParser(
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
    serve.add_argument(
        "--address", metavar="HOST:PORT", help="a Ray cluster's head, or auto (default: a Ray of its own)"
    )
    serve.add_argument(
        "--detach", action="store_true", help="return when it answers; it goes on until `tandem down`"
    )
    add_output(serve)
    serve.set_defaults(run=_serve)

    apply = commands.add_parser("apply", help="give a running cluster another configuration, while it serves")
    apply.add_argument("file", nargs="?", metavar="FILE", help="the same as --config FILE")
    apply.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")
    apply.add_argument(
        "--no-wait", action="store_true", help="return when it is decided, not when it is done"
    )
    apply.add_argument("--back", action="store_true", help="take back the rollout that is under way")
    add_settings(apply)
    add_address(apply, with_name=False)
    add_router(apply)
    add_output(apply)
    apply.set_defaults(run=_apply)

    chat = commands.add_parser("chat", help="talk to a running server")
    _add_server(chat)
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    chat.add_argument("--max-tokens", metavar="N", type=int, help="longest reply")
    # Lower than the API's 1.0: small models wander there, and a first impression is made once.
    chat.add_argument(
        "--temperature", metavar="T", type=float, default=0.3, help="0 always says the same (default 0.3)"
    )
    chat.set_defaults(run=_chat)

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
    trace.add_argument("--json", type=Path, metavar="FILE", help="all of it; - for standard output")
    add_output(trace)
    trace.set_defaults(run=_trace)

    why = commands.add_parser(
        "why", help="every millisecond of one request: what it waited for", describe=_describe_why
    )
    why.set_defaults(run=_why)

    top = commands.add_parser("top", help="the cluster as it is now, and its slowest requests by cause")
    _add_server(top)
    top.add_argument("--once", action="store_true", help="print it once, and end")
    top.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="seconds between two looks (default 2)"
    )
    add_output(top)
    top.set_defaults(run=_top)

    replay = commands.add_parser(
        "replay", help="step through what a node's scheduler saw and decided", describe=_describe_replay
    )
    replay.set_defaults(run=_replay)

    doctor = commands.add_parser("doctor", help="check this machine and say what to do about what is wrong")
    add_settings(doctor)
    doctor.add_argument(
        "--reach",
        action="append",
        default=[],
        metavar="HOST",
        help="also check that this machine reaches the ports of another one of the cluster (once for each)",
    )
    add_output(doctor)
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser(
        "bench", help="measure any OpenAI-compatible server as its users feel it", describe=_describe_bench
    )
    bench.set_defaults(run=_bench)

    chaos = commands.add_parser(
        "chaos",
        help="kill and stop processes of a cluster, and report what came of it",
        describe=_describe_chaos,
    )
    chaos.set_defaults(run=_chaos)

    profile = commands.add_parser(
        "profile", help="measure what a node's steps take, for `tandem simulate`", describe=_describe_profile
    )
    profile.set_defaults(run=_profile)

    simulate = commands.add_parser(
        "simulate", help="how a cluster would serve a traffic, without one", describe=_describe_simulate
    )
    simulate.set_defaults(run=_simulate)

    plan = commands.add_parser(
        "plan",
        help="how many nodes of each kind a traffic needs, and what they cost",
        describe=_describe_plan,
    )
    plan.set_defaults(run=_plan)

    config = commands.add_parser("config", help="print the configuration that these settings make")
    add_settings(config)
    add_output(config)
    config.set_defaults(run=_config)

    models = commands.add_parser("models", help="models on this machine")
    actions = models.add_subparsers(title="actions", metavar="ACTION", required=True)
    fetch = actions.add_parser("fetch", help="fetch a model now, so that serving it starts at once")
    fetch.add_argument("name", nargs="?", default="smollm2", metavar="MODEL")
    add_output(fetch)
    fetch.set_defaults(run=_fetch)
    listed = actions.add_parser("list", help="the models that were fetched, and the room they take")
    add_output(listed)
    listed.set_defaults(run=_list)
    remove = actions.add_parser("rm", help="delete fetched models from this machine")
    remove.add_argument("names", nargs="+", metavar="MODEL", help="as `tandem models list` names them")
    add_output(remove)
    remove.set_defaults(run=_remove)

    init = commands.add_parser(
        "init", help="write a tandem.yaml that explains every setting, and a cluster's files"
    )
    init.add_argument("folder", nargs="?", type=Path, default=Path(), help="where to (default: here)")
    init.add_argument(
        "--cluster",
        choices=("static", "aws", "gcp", "kuberay"),
        help="the files of a cluster too: machines that you have, a cloud's, or Kubernetes'",
    )
    add_settings(init)
    add_output(init)
    init.set_defaults(run=_init)

    completion = commands.add_parser("completion", help="print the lines that complete commands in a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    completion.set_defaults(run=_complete)
    return parser


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        default=DEFAULT_URL,
        help=f"where the router listens (default {DEFAULT_URL})",
    )


def _serve(options: argparse.Namespace) -> int:
    config = read_settings(options).config
    from tandem.cluster.commands.serve import ServeTarget, serve

    return serve(config, ServeTarget(options.address, options.detach, as_json=wants_json(options)))


def _apply(options: argparse.Namespace) -> int:
    from tandem.cluster.commands import apply
    from tandem.cluster.commands.address import WhichCluster
    from tandem.cluster.commands.operate import say_aside, say_line
    from tandem.wire.errors import ConfigurationError

    say = say_aside if wants_json(options) else say_line
    if options.back:
        done = apply.go_back(WhichCluster(options.address, options.name), options.url, say)
        if wants_json(options):
            print_json({"done": done})
        return 0 if done else 1
    if options.file is not None:
        if options.config is not None:
            raise ConfigurationError("FILE and --config FILE name two files: leave one out")
        options.config = options.file
    config = read_settings(options).config
    change, done = apply.apply(
        config,
        # A router belongs to one deployment alone.
        WhichCluster(options.address, config.name if options.url is None else None),
        options.url,
        say,
        dry_run=options.dry_run,
        wait=not options.no_wait,
    )
    if wants_json(options):
        print_json({"change": change, "done": done})
    return 0 if done else 1


def _config(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.show_config import as_values, render

    settings = read_settings(options)
    if wants_json(options):
        print_json(as_values(settings))
    else:
        print(render(settings), end="")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.commands.doctor import doctor

    config = read_settings(options).config
    return doctor(config, Console(), hosts=options.reach, as_json=wants_json(options))


def _bench(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.bench import run

    if wants_json(options) and options.json is None:
        options.json = Path("-")
    return run(options)


def _profile(options: argparse.Namespace) -> int:
    from tandem.simulator.profile_command import run

    costs = run(options, as_json=wants_json(options))
    if wants_json(options):
        print_json(costs)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from tandem.simulator.command import run

    result = run(options, read_settings(options).config, as_json=wants_json(options))
    if wants_json(options):
        print_json(result)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from tandem.simulator.plan_command import run

    def configure(more: Mapping[str, str]) -> TandemConfig:
        given = argparse.Namespace(**vars(options))
        given.set = [*options.set, *(f"{name}={value}" for name, value in more.items())]
        return read_settings(given).config

    plan = run(options, configure, as_json=wants_json(options))
    if wants_json(options):
        print_json(plan)
    return 0 if plan.chosen is not None else 1


def _chaos(options: argparse.Namespace) -> int:
    from tandem.cluster.chaos.command import run

    return run(options)


def _chat(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.api_client import key_from_environment
    from tandem.cluster.commands.chat import ChatClient, chat

    client = ChatClient(options.url, key_from_environment())
    try:
        sampling = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        given = {name: value for name, value in sampling.items() if value is not None}
        return chat(client, Console(), options.system, given)
    finally:
        client.close()


def _trace(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.api_client import key_from_environment
    from tandem.cluster.trace.command import TraceClient, run

    client = TraceClient(options.url, key_from_environment())
    try:
        if wants_json(options) and options.request is None:
            print_json(client.recent())
            return 0
        json = options.json or (Path("-") if wants_json(options) else None)
        return run(client, Console(), options.request, options.picture, json)
    finally:
        client.close()


def _why(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.api_client import key_from_environment
    from tandem.cluster.trace.command import TraceClient, explained
    from tandem.cluster.trace.why_text import show_explanation

    client = TraceClient(options.url, key_from_environment())
    try:
        explanation = explained(client, options.request)
        if options.costs is not None:
            from tandem.simulator.options import costs_of
            from tandem.simulator.what_if import compared

            config, costs = read_settings(options).config, costs_of(options)
            explanation = compared(explanation, client.state(), config, costs, Console(stderr=True))
    finally:
        client.close()
    if wants_json(options):
        print_json(explanation)
    else:
        show_explanation(Console(), explanation)
    return 0


def _top(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.api_client import ApiClient, key_from_environment
    from tandem.cluster.commands.top import run

    client = ApiClient(options.url, key_from_environment())
    try:
        return run(client, Console(), options.every, once=options.once, as_json=wants_json(options))
    finally:
        client.close()


def _replay(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.replay.command import run

    return run(options, Console())


def _fetch(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.commands.progress import Display
    from tandem.cluster.models.store import prepare_model

    display = Display(Console(stderr=wants_json(options)))
    display.start()
    try:
        with display.step("model", f"looking for {options.name}", f"{options.name} is here") as report:
            model = prepare_model(options.name, report)
    finally:
        display.stop()
    if wants_json(options):
        print_json({"name": options.name, "path": model.path})
    else:
        print(model.path)
    return 0


def _list(options: argparse.Namespace) -> int:
    from tandem.cluster.models.fetched import fetched_models, show

    models = fetched_models()
    if wants_json(options):
        print_json(models)
    else:
        print(show(models), end="")
    return 0


def _remove(options: argparse.Namespace) -> int:
    from tandem.cluster.describe import format_size
    from tandem.cluster.models.fetched import remove

    removed = remove(options.names)
    if wants_json(options):
        print_json(removed)
    else:
        for model in removed:
            print(f"{model.name} is deleted: {format_size(model.num_bytes)} in {model.path}")
    return 0


def _init(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.init import cluster_settings, init
    from tandem.cluster.setting_layers import read_file
    from tandem.cluster.settings import resolve

    layers = [cluster_settings(options.cluster), flags_of(options)]
    if options.config is not None:
        layers.insert(1, read_file(Path(options.config)))
    files = init(options.folder, resolve(layers), options.cluster)
    if wants_json(options):
        print_json([str(file) for file in files])
    else:
        print("\n".join(map(str, files)))
    return 0


def _complete(options: argparse.Namespace) -> int:
    from tandem.cluster.completion import SCRIPTS, complete

    if options.words is None:
        print(SCRIPTS[options.shell], end="")
    else:
        print("\n".join(complete(make_parser(), options.words)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
