"""Runs each subcommand with its options. A subcommand's imports happen when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cluster.commands.output import print_json, wants_json
from tandem.cluster.commands.setting_options import flags_of, read_settings

if TYPE_CHECKING:
    from tandem.cluster.config import TandemConfig


def run_serve(options: argparse.Namespace) -> int:
    config = read_settings(options).config
    from tandem.cluster.commands.serve import ServeTarget, serve

    return serve(config, ServeTarget(options.address, options.detach, as_json=wants_json(options)))


def run_apply(options: argparse.Namespace) -> int:
    from tandem.base.errors import ConfigurationError
    from tandem.cluster.commands import apply
    from tandem.cluster.commands.address import WhichCluster
    from tandem.cluster.commands.operate import say_aside, say_line

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
        # A router belongs to one deployment, so its name is not needed.
        WhichCluster(options.address, config.name if options.url is None else None),
        options.url,
        say,
        dry_run=options.dry_run,
        wait=not options.no_wait,
    )
    if wants_json(options):
        print_json({"change": change, "done": done})
    return 0 if done else 1


def run_config(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.show_config import as_values, render

    if options.schema:
        from tandem.cluster.schema import json_schema

        print_json(json_schema())
        return 0
    settings = read_settings(options)
    if wants_json(options):
        print_json(as_values(settings))
    else:
        print(render(settings), end="")
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.commands.doctor import doctor

    config = read_settings(options).config
    return doctor(config, Console(), hosts=options.reach, as_json=wants_json(options))


def run_bench(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.bench import run
    from tandem.cluster.commands.router_url import choose_url

    options.url = choose_url(options.url)
    if wants_json(options) and options.json is None:
        options.json = Path("-")
    return run(options)


def run_profile(options: argparse.Namespace) -> int:
    from tandem.cluster.commands.router_url import choose_url
    from tandem.simulator.profile_command import run

    options.url = choose_url(options.url)
    costs = run(options, as_json=wants_json(options))
    if wants_json(options):
        print_json(costs)
    return 0


def run_simulate(options: argparse.Namespace) -> int:
    from tandem.simulator.command import run

    result = run(options, read_settings(options).config, as_json=wants_json(options))
    if wants_json(options):
        print_json(result)
    return 0


def run_plan(options: argparse.Namespace) -> int:
    from tandem.simulator.plan_command import run

    def configure(more: Mapping[str, str]) -> TandemConfig:
        given = argparse.Namespace(**vars(options))
        given.set = [*options.set, *(f"{name}={value}" for name, value in more.items())]
        return read_settings(given).config

    plan = run(options, configure, as_json=wants_json(options))
    if wants_json(options):
        print_json(plan)
    return 0 if plan.chosen is not None else 1


def run_chaos(options: argparse.Namespace) -> int:
    from tandem.cluster.chaos.command import run

    return run(options)


def run_chat(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.api_client import key_from_environment
    from tandem.cluster.commands.chat import ChatClient, chat
    from tandem.cluster.commands.router_url import choose_url

    client = ChatClient(choose_url(options.url), key_from_environment())
    try:
        sampling = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        given = {name: value for name, value in sampling.items() if value is not None}
        return chat(client, Console(), options.system, given)
    finally:
        client.close()


def run_trace(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.api_client import key_from_environment
    from tandem.cluster.commands.router_url import choose_url
    from tandem.cluster.trace.command import TraceClient, run

    client = TraceClient(choose_url(options.url), key_from_environment())
    try:
        if wants_json(options) and options.request is None:
            print_json(client.recent())
            return 0
        json = options.json or (Path("-") if wants_json(options) else None)
        return run(client, Console(), options.request, options.picture, json)
    finally:
        client.close()


def run_why(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.api_client import key_from_environment
    from tandem.cluster.commands.router_url import choose_url
    from tandem.cluster.trace.command import TraceClient, explained
    from tandem.cluster.trace.why_text import show_explanation

    client = TraceClient(choose_url(options.url), key_from_environment())
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


def run_top(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.api_client import ApiClient, key_from_environment
    from tandem.cluster.commands.router_url import choose_url
    from tandem.cluster.commands.top import run

    client = ApiClient(choose_url(options.url), key_from_environment())
    try:
        return run(client, Console(), options.every, once=options.once, as_json=wants_json(options))
    finally:
        client.close()


def run_replay(options: argparse.Namespace) -> int:
    from rich.console import Console

    from tandem.cluster.replay.command import run

    return run(options, Console())


def run_fetch(options: argparse.Namespace) -> int:
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
    if wants_json(options):
        print_json({"name": options.name, "path": model.path})
    else:
        print(model.path)
    return 0


def run_list(options: argparse.Namespace) -> int:
    from tandem.cluster.models.fetched import fetched_models, show

    models = fetched_models()
    if wants_json(options):
        print_json(models)
    else:
        print(show(models), end="")
    return 0


def run_remove(options: argparse.Namespace) -> int:
    from tandem.cluster.describe import format_size
    from tandem.cluster.models.fetched import remove

    removed = remove(options.names)
    if wants_json(options):
        print_json(removed)
    else:
        for model in removed:
            print(f"{model.name} is deleted: {format_size(model.num_bytes)} in {model.path}")
    return 0


def run_init(options: argparse.Namespace) -> int:
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
        there = "" if files[0].parent == Path() else f" --config {files[0]}"
        print(f"next: {f'tandem serve{there}' if options.cluster is None else 'docs/ray-up.md'}")
    return 0
