"""The options of `tandem bench`."""

from __future__ import annotations

import argparse
import enum
import math
from pathlib import Path

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.base.flags import adder
from tandem.loadgen.api import ApiEndpoint
from tandem.loadgen.metrics import ServiceLevel, parse_service_level

_DEFAULT_REQUESTS = 100
MOST_PROMPT_TOKENS = 1 << 30  # of all requests together: they are in memory before the run begins


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

    def _prompt_tokens(self) -> int:
        """How many tokens are drawn before the run, without those of a trace."""
        measured = self.sessions if self.workload is not Workload.TRACE else None
        shared = self.prefix * self.prefixes if self.workload is Workload.SHARED_PREFIX else 0
        more = self.prefix if self.workload is Workload.SHARED_PREFIX else 0
        if self.workload is Workload.MULTI_TURN:
            more = (self.turns - 1) * (self.input if self.turn_input is None else self.turn_input)
        return shared + ((measured or 0) + self.warmup_sessions) * (self.input + more)

    def check(self) -> None:
        """Checks the rules between several flags. Raises ConfigurationError."""
        for name in ("rate", "duration", "timeout", "think", "spread", "trace_speed", "trace_scale", "temperature"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigurationError(f"--{name.replace('_', '-')} must be a number that is finite, not {value:g}")
        if self.requests is not None and self.requests < 1:
            raise ConfigurationError(f"--requests must be at least 1, not {self.requests}")
        if (tokens := self._prompt_tokens()) > MOST_PROMPT_TOKENS:
            raise ConfigurationError(
                f"the prompts, with those of the warm-up, would have {tokens:,} tokens: at most {MOST_PROMPT_TOKENS:,} are made"
            )
        if self.duration is not None and self.duration <= 0:
            raise ConfigurationError(f"--duration must be above 0 seconds, not {self.duration:g}")
        if self.timeout <= 0:
            raise ConfigurationError(f"--timeout must be above 0 seconds, not {self.timeout:g}")
        for name, value in (("warmup", self.warmup), ("seed", self.seed), ("think", self.think)):
            if value is not None and value < 0:
                raise ConfigurationError(f"--{name} must not be negative, not {value:g}")
        if (self.trace is not None) != (self.workload is Workload.TRACE):
            raise ConfigurationError("--trace FILE and --workload trace need each other: give both, or neither")
        if self.prompt_format is PromptFormat.IDS and self.endpoint is ApiEndpoint.CHAT:
            raise ConfigurationError("the chat endpoint takes no token ids: leave --prompt-format at text")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser.add_argument_group("server"))
    add(
        "--url", None, str,
        "any OpenAI-compatible server (default: the `tandem serve` that runs on this machine, whatever its port); put its key "
        "into TANDEM_API_KEY or OPENAI_API_KEY",
    )  # fmt: skip
    add("--model", None, str, "the model's name on the server (default: the first one that the server lists)")
    add("--endpoint", None, ApiEndpoint.COMPLETIONS, "(%(default)s)")
    add("--timeout", "S", 600.0, "seconds for one request (%(default)s)")

    add = adder(parser.add_argument_group("what is asked"))
    add("--tokenizer", "FOLDER", Path, "the model's folder; its tokenizer makes prompts' lengths exact to the token")
    add("--prompt-format", None, PromptFormat.TEXT, "(%(default)s)")
    add("--workload", None, Workload.RANDOM, "(%(default)s)")
    all_of = f"({_DEFAULT_REQUESTS}, or all of a trace)"
    add("--requests", "N", int, f"how many requests, or conversations of a multi-turn workload {all_of}")
    add("--input", "TOKENS", 512, "length of a prompt (%(default)s)")
    add("--output", "TOKENS", 64, "length of an answer (%(default)s)")
    add("--spread", "R", 0.0, "draw both lengths evenly from within ±R of these, such as 0.2 (%(default)s)")
    add("--prefix", "TOKENS", 1000, "shared-prefix: length of the prefix (%(default)s)")
    add("--prefixes", "N", 1, "shared-prefix: number of prefixes (%(default)s)")
    add("--turns", "N", 4, "multi-turn: turns of a conversation (%(default)s)")
    add("--turn-input", "TOKENS", int, "multi-turn: what each later turn adds (as --input)")
    add("--think", "S", 0.0, "multi-turn: seconds between turns (%(default)s)")
    add("--trace", "FILE", Path, "trace: a file in Mooncake's JSONL or Azure's CSV format")
    add("--trace-speed", "X", 1.0, "trace: replay it X times as fast")
    add("--trace-scale", "X", 1.0, "trace: multiply all lengths by X")
    add("--temperature", "T", float, "(the server's default)")
    add("--stop-at-eos", None, False, "let answers end by themselves; otherwise ignore_eos is sent")
    add("--seed", "N", 0, "for prompts, lengths and arrivals (%(default)s)")

    add = adder(parser.add_argument_group("when it is asked"))
    add(
        "--concurrency",
        "N",
        int,
        "how many users, who each wait for their answer (1); with --rate, the most requests at once",
    )
    add("--rate", "R", float, "Poisson arrivals, R requests a second")
    add("--duration", "S", float, "send no new requests after S seconds")
    share_nothing = "unmeasured requests before the run, which share nothing with the measured ones"
    add("--warmup", "N", int, f"{share_nothing} (as many as users)")

    add = adder(parser.add_argument_group("what is shown"))
    limits = "report goodput under these limits, such as ttft=200ms,itl=50ms (ttft, tpot, itl, e2e)"
    add("--slo", "LIMITS", service_level, limits)
    add("--json", "FILE", Path, "the whole report as JSON; - for standard output")
    add("--plot", "FILE", Path, "distributions and throughput, as .png or .svg")
    in_the_middle = "trace a request in the middle of the run: show where its time went, and draw it"
    add("--timeline", "FILE", Path, f"{in_the_middle} as .png or .svg (Tandem only)")


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
