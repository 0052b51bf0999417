"""The options of `tandem bench`."""

from __future__ import annotations

import argparse
import enum
from pathlib import Path

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.loadgen.api import ApiEndpoint
from tandem.loadgen.metrics import ServiceLevel, parse_service_level

_DEFAULT_REQUESTS = 100


class Workload(enum.StrEnum):
    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MULTI_TURN = "multi-turn"
    TRACE = "trace"


class PromptFormat(enum.StrEnum):
    TEXT = "text"
    IDS = "ids"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str | None
    tokenizer: Path | None
    endpoint: ApiEndpoint
    prompt_format: PromptFormat
    workload: Workload
    requests: int | None
    input: int
    output: int
    spread: float
    prefix: int
    prefixes: int
    turns: int
    turn_input: int | None
    think: float
    trace: Path | None
    trace_speed: float
    trace_scale: float
    concurrency: int | None
    rate: float | None
    duration: float | None
    warmup: int | None
    seed: int
    temperature: float | None
    stop_at_eos: bool
    timeout: float
    slo: ServiceLevel | None
    json: Path | None
    plot: Path | None
    timeline: Path | None

    @property
    def sessions(self) -> int | None:
        """How many sessions to make; None: as many as the trace has."""
        if self.requests is not None or self.workload is Workload.TRACE:
            return self.requests
        return _DEFAULT_REQUESTS

    @property
    def users(self) -> int | None:
        """How many sessions may run at once; None: no limit."""
        if self.concurrency is None and self.rate is None and self.workload is not Workload.TRACE:
            return 1
        return self.concurrency

    @property
    def follows_trace(self) -> bool:
        return self.workload is Workload.TRACE and self.rate is None and self.concurrency is None

    @property
    def warmup_sessions(self) -> int:
        return self.warmup if self.warmup is not None else (self.users or 1)

    def check(self) -> None:
        """Checks the rules between several flags. Raises ConfigurationError."""
        if self.requests is not None and self.requests < 1:
            raise ConfigurationError(f"--requests must be at least 1, not {self.requests}")
        if self.duration is not None and self.duration <= 0:
            raise ConfigurationError(f"--duration must be above 0 seconds, not {self.duration:g}")
        if self.timeout <= 0:
            raise ConfigurationError(f"--timeout must be above 0 seconds, not {self.timeout:g}")
        for name, value in (("warmup", self.warmup), ("seed", self.seed), ("think", self.think)):
            if value is not None and value < 0:
                raise ConfigurationError(f"--{name} must not be negative, not {value:g}")
        if (self.trace is not None) != (self.workload is Workload.TRACE):
            raise ConfigurationError(
                "--trace FILE and --workload trace need each other: give both, or neither"
            )
        if self.prompt_format is PromptFormat.IDS and self.endpoint is ApiEndpoint.CHAT:
            raise ConfigurationError("the chat endpoint takes no token ids: leave --prompt-format at text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server(parser)
    _add_what_is_asked(parser)
    _add_when_it_is_asked(parser)
    _add_what_is_shown(parser)


def _add_server(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url",
        help="any OpenAI-compatible server (default: the `tandem serve` that runs on this machine, whatever its port); put its key "
        "into TANDEM_API_KEY or OPENAI_API_KEY",
    )
    server.add_argument(
        "--model", help="the model's name on the server (default: the first one that the server lists)"
    )
    server.add_argument(
        "--endpoint",
        choices=[choice.value for choice in ApiEndpoint],
        default=ApiEndpoint.COMPLETIONS.value,
        help="(%(default)s)",
    )
    server.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for one request (%(default)s)"
    )


def _add_what_is_asked(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="the model's folder; its tokenizer makes prompts' lengths exact to the token",
    )
    asked.add_argument(
        "--prompt-format",
        choices=[choice.value for choice in PromptFormat],
        default=PromptFormat.TEXT.value,
        help="(%(default)s)",
    )
    asked.add_argument(
        "--workload",
        choices=[choice.value for choice in Workload],
        default=Workload.RANDOM.value,
        help="(%(default)s)",
    )
    asked.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"how many requests, or conversations of a multi-turn workload ({_DEFAULT_REQUESTS}, or all of a trace)",
    )
    asked.add_argument(
        "--input", type=int, default=512, metavar="TOKENS", help="length of a prompt (%(default)s)"
    )
    asked.add_argument(
        "--output", type=int, default=64, metavar="TOKENS", help="length of an answer (%(default)s)"
    )
    asked.add_argument(
        "--spread",
        type=float,
        default=0.0,
        metavar="R",
        help="draw both lengths evenly from within ±R of these, such as 0.2 (%(default)s)",
    )
    asked.add_argument(
        "--prefix",
        type=int,
        default=1000,
        metavar="TOKENS",
        help="shared-prefix: length of the prefix (%(default)s)",
    )
    asked.add_argument(
        "--prefixes", type=int, default=1, metavar="N", help="shared-prefix: number of prefixes (%(default)s)"
    )
    asked.add_argument(
        "--turns", type=int, default=4, metavar="N", help="multi-turn: turns of a conversation (%(default)s)"
    )
    asked.add_argument(
        "--turn-input", type=int, metavar="TOKENS", help="multi-turn: what each later turn adds (as --input)"
    )
    asked.add_argument(
        "--think",
        type=float,
        default=0.0,
        metavar="S",
        help="multi-turn: seconds between turns (%(default)s)",
    )
    asked.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace: a file in Mooncake's JSONL or Azure's CSV format"
    )
    asked.add_argument(
        "--trace-speed", type=float, default=1.0, metavar="X", help="trace: replay it X times as fast"
    )
    asked.add_argument(
        "--trace-scale", type=float, default=1.0, metavar="X", help="trace: multiply all lengths by X"
    )
    asked.add_argument("--temperature", type=float, metavar="T", help="(the server's default)")
    asked.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="let answers end by themselves; otherwise ignore_eos is sent",
    )
    asked.add_argument(
        "--seed", type=int, default=0, metavar="N", help="for prompts, lengths and arrivals (%(default)s)"
    )


def _add_when_it_is_asked(parser: argparse.ArgumentParser) -> None:
    when = parser.add_argument_group("when it is asked")
    when.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="how many users, who each wait for their answer (1); with --rate, the most requests at once",
    )
    when.add_argument("--rate", type=float, metavar="R", help="Poisson arrivals, R requests a second")
    when.add_argument("--duration", type=float, metavar="S", help="send no new requests after S seconds")
    when.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help="unmeasured requests before the run, which share nothing with the measured ones (as many as users)",
    )


def _add_what_is_shown(parser: argparse.ArgumentParser) -> None:
    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        "--slo",
        type=service_level,
        metavar="LIMITS",
        help="report goodput under these limits, such as ttft=200ms,itl=50ms (ttft, tpot, itl, e2e)",
    )
    shown.add_argument(
        "--json", type=Path, metavar="FILE", help="the whole report as JSON; - for standard output"
    )
    shown.add_argument(
        "--plot", type=Path, metavar="FILE", help="distributions and throughput, as .png or .svg"
    )
    shown.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="trace a request in the middle of the run: show where its time went, and draw it as .png or .svg (Tandem only)",
    )


def service_level(text: str) -> ServiceLevel:
    try:
        return parse_service_level(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def options_from(args: argparse.Namespace) -> Options:
    """Raises ConfigurationError for flags that contradict each other."""
    given = {name: getattr(args, name) for name in Options.__struct_fields__}
    options = msgspec.structs.replace(
        Options(**given),
        endpoint=ApiEndpoint(args.endpoint),
        prompt_format=PromptFormat(args.prompt_format),
        workload=Workload(args.workload),
    )
    options.check()
    return options
