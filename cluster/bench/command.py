"""`tandem bench`: measures any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import secrets
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console

from tandem.base.errors import ConfigurationError, TandemError
from tandem.cluster.api_client import key_from_environment
from tandem.cluster.commands.output import add_output, wants_json
from tandem.cluster.commands.router_url import choose_url
from tandem.cluster.models.store import find_model
from tandem.cluster.saving import as_json, check_file, check_picture, new_figure, save_picture, write_json
from tandem.cluster.trace.command import TraceClient
from tandem.cluster.trace.picture import draw_trace
from tandem.cluster.trace.text import show_trace
from tandem.loadgen import options as load_options
from tandem.loadgen.api import Api, ListedModel, RequestShape, served_models
from tandem.loadgen.connections import Address, HttpClient
from tandem.loadgen.load import LoadStream, arrival_times, make_sessions
from tandem.loadgen.metrics import summarize
from tandem.loadgen.options import Options, PromptFormat, options_from
from tandem.loadgen.report import make_report
from tandem.loadgen.show import plot_run, print_summary, with_progress
from tandem.loadgen.vocabulary import GuessedVocabulary, IdVocabulary, TextVocabulary, Vocabulary, load_tokenizer
from tandem.loadgen.workload import Session

# With a larger share of a core, the figures may be limited by the generator itself.
_BUSY_GENERATOR = 0.7
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    load_options.add_arguments(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 when it measured, 1 when no request succeeded, 130 when it was interrupted; then it shows what it measured until then.
    Raises ConfigurationError for what the operator can correct."""
    args.url = choose_url(args.url)
    options = options_from(args)
    _check_files(options)
    to_stdout = wants_json(args) or options.json == Path("-")
    return asyncio.run(_measure(options, Console(stderr=True), to_stdout=to_stdout))


def _check_files(options: Options) -> None:
    if options.json is not None and options.json != Path("-"):
        check_file(options.json)
    for picture, option in ((options.plot, "--plot"), (options.timeline, "--timeline")):
        if picture is not None:
            check_picture(picture, option)


async def _measure(options: Options, errors: Console, *, to_stdout: bool) -> int:
    key = key_from_environment() or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with HttpClient(Address.of_url(options.url), headers) as http:
        model = await _model(options, http)
        vocabulary = _vocabulary(options, model, errors)
        api = Api(http, _shape(options, model))
        trace = f"bench-{secrets.token_hex(8)}" if options.timeline is not None else ""
        sessions, warmup = make_sessions(options, vocabulary)
        if warmup:
            await _warm_up(api, options, warmup, errors)
        load = LoadStream(
            str(options.workload),
            api,
            sessions,
            concurrency=options.users,
            arrivals=arrival_times(options, sessions),
            trace=trace,
        )
        # Garbage collection during the run need not look at what the set-up left, least of all while a token is awaited.
        gc.collect()
        gc.freeze()
        busy_before = time.process_time()
        interrupted = False
        try:
            await with_progress(load.run(options.duration), [load], errors, str(options.workload))
        except asyncio.CancelledError:
            interrupted = True
        busy = (time.process_time() - busy_before) / max(load.duration_s, 1e-9)
    _show(options, load, busy, not isinstance(vocabulary, GuessedVocabulary), model, errors, to_stdout=to_stdout)
    if options.timeline is not None:
        await asyncio.to_thread(_show_timeline, options.url, key, trace, options.timeline, errors)
    if interrupted:
        return _INTERRUPTED
    return 0 if any(timeline.succeeded for timeline in load.timelines) else 1


def _show_timeline(url: str, key: str | None, trace: str, file: Path, errors: Console) -> None:
    client = TraceClient(url, key)
    try:
        record = client.find(trace)
    except TandemError as error:  # not a Tandem server, or it has ended; the measurement is shown without a timeline
        errors.print(f"No timeline: {error}", style="yellow", markup=False)
        return
    finally:
        client.close()
    show_trace(errors, record)
    save_picture(draw_trace(record), file)


async def _model(options: Options, http: HttpClient) -> ListedModel:
    if options.model is not None and options.tokenizer is not None:
        return ListedModel(options.model)
    try:
        listed = await served_models(http)
    except ConfigurationError:
        if options.model is None:
            raise
        return ListedModel(options.model)
    if not listed and options.model is None:
        raise ConfigurationError("the server lists no model: name one with --model")
    if options.model is None:
        return listed[0]
    return next((model for model in listed if model.id == options.model), ListedModel(options.model))


def _vocabulary(options: Options, model: ListedModel, errors: Console) -> Vocabulary:
    folder = options.tokenizer or model.tokenizer_folder or _folder_of(model.id)
    if folder is not None:
        tokenizer = load_tokenizer(folder)
        return IdVocabulary(tokenizer) if options.prompt_format is PromptFormat.IDS else TextVocabulary(tokenizer)
    if options.prompt_format is PromptFormat.IDS:
        raise ConfigurationError("--prompt-format ids needs --tokenizer FOLDER")
    errors.print("No --tokenizer: prompts have about the requested lengths; the figures use the server's own counts.")
    return GuessedVocabulary()


def _folder_of(name: str) -> Path | None:
    """Returns the tokenizer's folder of a model that Tandem serves from this machine; None if the model is not here."""
    try:
        found = find_model(name)
    except ConfigurationError:  # another server's name for it
        return None
    return ListedModel(name, root=found.path).tokenizer_folder if found is not None else None


def _shape(options: Options, model: ListedModel) -> RequestShape:
    return RequestShape(
        model=model.id,
        endpoint=options.endpoint,
        ignore_eos=not options.stop_at_eos,
        temperature=options.temperature,
        timeout_s=options.timeout,
    )


async def _warm_up(api: Api, options: Options, sessions: list[Session], errors: Console) -> None:
    load = LoadStream("warm-up", api, sessions, concurrency=options.users or len(sessions))
    await with_progress(load.run(), [load], errors, "warm-up")
    failures = [timeline.failure for timeline in load.timelines if timeline.failure is not None]
    if len(failures) == len(load.timelines):
        raise ConfigurationError(f"every request of the warm-up failed, {failures[0].kind}: {failures[0]}")


def _show(
    options: Options,
    load: LoadStream,
    busy: float,
    exact: bool,
    model: ListedModel,
    errors: Console,
    *,
    to_stdout: bool,
) -> None:
    summary = summarize(load.label, load.timelines, load.duration_s, options.slo)
    print_summary(errors if to_stdout else Console(), summary)
    if busy > _BUSY_GENERATOR:
        errors.print(
            f"The generator itself used {busy:.0%} of a core: the figures may be limited by it.", style="yellow"
        )
    if options.json is not None or to_stdout:
        settings = msgspec.structs.asdict(options) | {"model": model.id}
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        report = make_report(plain, exact, busy, [summary], load.timelines, load.began_at)
        if to_stdout:
            sys.stdout.buffer.write(as_json(report))
        if options.json not in (None, Path("-")):
            write_json(report, options.json)
    if options.plot is not None:
        figure = new_figure(11, 7)
        plot_run(figure, load.timelines, load.began_at, f"{model.id}, {options.workload}")
        save_picture(figure, options.plot)
