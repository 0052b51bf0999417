"""The commands that begin and end a cluster, and prepare one: their options, and what they print."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.base.flags import adder
from tandem.cluster.commands.options import add_address, which_cluster
from tandem.cluster.commands.output import add_output, print_found, print_json, wants_json
from tandem.cluster.commands.parser import SERVE, Command
from tandem.cluster.commands.setting_options import add_settings, flags_of, read_settings


def _describe_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("served", nargs="?", metavar="MODEL", help="the model, as with --model")
    add_settings(parser)
    add = adder(parser.add_argument_group("where it runs"))
    add("--address", "HOST:PORT", str, "a Ray cluster's head, or auto (default: start a Ray of its own)")
    add("--detach", None, False, "return when the cluster answers; it runs until `tandem down`")
    adder(parser)("--timings", None, False, "when it answers, also say what its start waited for")
    add_output(parser)


def _serve(options: argparse.Namespace) -> int:
    config = read_settings(options).config
    from tandem.cluster.commands.serve import ServeTarget, serve

    where = ServeTarget(options.address, options.detach, as_json=wants_json(options), timings=options.timings)
    return serve(config, where)


def _describe_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", type=Path, default=Path(), help="where to write (default: here)")
    parser.add_argument(
        "--cluster",
        choices=("static", "aws", "gcp", "kuberay"),
        help="also write a cluster's files: for your own machines, a cloud, or Kubernetes",
    )
    add_settings(parser)
    add_output(parser)


def _init(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.init import cluster_settings, init
    from tandem.cluster.settings.combined import resolve
    from tandem.cluster.settings.layers import read_file

    layers = [cluster_settings(options.cluster), flags_of(options)]
    if options.config is not None:
        layers.insert(1, read_file(Path(options.config)))
    files = init(options.folder, resolve(layers), options.cluster)
    if wants_json(options):
        print_json([str(file) for file in files])
    else:
        print("\n".join(map(str, files)))
        there = "" if files[0].parent == Path() else f" --config {files[0]}"
        print(f"next: {f'tandem serve{there}' if options.cluster is None else 'docs/ray-up.md'}")
    return 0


def _describe_config(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)
    adder(parser)("--schema", None, False, "print the JSON schema of tandem.yaml instead, for editors")
    add_output(parser)


def _config(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.show_config import as_values, render

    if options.schema:
        from tandem.cluster.settings.schema import json_schema

        print_json(json_schema())
        return 0
    settings = read_settings(options)
    print_found(options, as_values(settings), lambda: print(render(settings), end=""))
    return 0


def _describe_models(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    fetch = actions.add_parser("fetch", help="fetch a model now, so that serving starts at once later")
    fetch.add_argument("name", nargs="?", default="smollm2", metavar="MODEL")
    listed = actions.add_parser("list", help="the models that were fetched, and their size")
    remove = actions.add_parser("rm", help="delete fetched models from this machine")
    remove.add_argument("names", nargs="+", metavar="MODEL", help="as `tandem models list` names them")
    for action, run in ((fetch, _fetch), (listed, _list), (remove, _remove)):
        add_output(action)
        action.set_defaults(run=run)


def _fetch(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.commands.progress import Display
    from tandem.cluster.models.store import name_at, prepare_model

    options.name = name_at(options.name)
    display = Display(Console(stderr=wants_json(options)))
    display.start()
    try:
        with display.step("model", f"looking for {options.name}", f"{options.name} is here") as report:
            model = prepare_model(options.name, report)
    finally:
        display.stop()
    print_found(options, {"name": options.name, "path": model.path}, lambda: print(model.path))
    return 0


def _list(options: argparse.Namespace) -> int:
    from tandem.cluster.models.fetched import fetched_models, show

    models = fetched_models()
    print_found(options, models, lambda: print(show(models), end=""))
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


def _describe_engines(parser: argparse.ArgumentParser) -> None:
    adder(parser)("python", "PYTHON", "", "of another engine's environment, such as /opt/vllm/bin/python", nargs="?")
    add_output(parser)


def _engines(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.engines import engines_found, show

    found = engines_found(options.python)
    print_found(options, found, lambda: print(show(found), end=""))
    return 0


def _describe_down(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--now", action="store_true", help="do not wait for running requests")
    add_address(parser)
    add_output(parser)


def _down(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.operate import down, say_aside, say_line

    say = say_aside if wants_json(options) else say_line
    finished = down(which_cluster(options), now=options.now, say=say)
    print_found(options, {"finished": finished})
    return 0 if finished or options.now else 1


COMMANDS = (
    Command(
        "serve", "serve a model, on this machine or on a Ray cluster", SERVE, _describe_serve, _serve,
        epilog="vLLM's and SGLang's commonest flags are understood, or answered: docs/from-vllm.md",
    ),
    Command("init", "write a tandem.yaml that explains every setting, and a cluster's files", SERVE, _describe_init, _init),
    Command("config", "print the configuration that results from these settings", SERVE, _describe_config, _config),
    Command("models", "models on this machine", SERVE, _describe_models, _list),
    Command("engines", "what can compute models, and what of it an environment has", SERVE, _describe_engines, _engines),
    Command("down", "end everything that `tandem serve` started on a Ray cluster", SERVE, _describe_down, _down),
)  # fmt: skip
