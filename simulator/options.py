"""The command-line options that the commands of the simulator share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tandem.base.errors import ConfigurationError
from tandem.base.flags import adder
from tandem.cluster.commands.router_url import choose_url
from tandem.cluster.config import TandemConfig
from tandem.cluster.replay.reading import TraceReader
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.traces import TraceRow, read_trace
from tandem.simulator.costs import EXAMPLE, CostModel, Width, read_costs
from tandem.simulator.learnt import learnt_costs
from tandem.simulator.traffic import PlayedTraffic, RecordedTraffic, SyntheticTraffic, rows_of_steps
from tandem.wire.nodes import ENGINE_ROLES, Role

EXAMPLE_NAME, RUNNING = "example", "running"

CostsByWidth = Mapping[Role, Mapping[Width, CostModel]]


def add_costs(
    parser: argparse.ArgumentParser, title: str = "nodes", *, required: bool = True, several: bool = False
) -> None:
    """Adds the options for cost files. `several`: each takes several files, one for each width of node."""
    add = adder(parser.add_argument_group(title))
    more = "; several files: of nodes of several widths, which are compared" if several else ""
    what = (
        f"of a node, as `tandem profile` writes them; `{RUNNING}`, or a router's URL: as the nodes of that cluster have learnt them; "
        f"`{EXAMPLE_NAME}`: those of a small node of another machine{more}"
    )
    nargs = "+" if several else None
    add("--costs", "FILE", _costs_source, what, required=required, nargs=nargs)
    add("--prefill-costs", "FILE", _costs_source, "of prefill nodes, if they differ", nargs=nargs)
    add("--decode-costs", "FILE", _costs_source, "of decode nodes, if they differ", nargs=nargs)


def _costs_source(text: str) -> Path | str:
    """Returns the file, or the URL of the cluster, whose costs to take."""
    if text == EXAMPLE_NAME:
        return EXAMPLE
    return text if text == RUNNING or text.startswith(("http://", "https://")) else Path(text)


def costs_of(options: argparse.Namespace) -> dict[Role, CostModel]:
    costs = dict(_read(options.costs))
    for role, source in ((Role.PREFILL, options.prefill_costs), (Role.DECODE, options.decode_costs)):
        if source is not None:
            costs[role] = _read(source)[role]
    return costs


def given_costs(options: argparse.Namespace) -> dict[Role, CostModel] | None:
    """Returns the costs of a command that has others, or none, without --costs."""
    if options.costs is not None:
        return costs_of(options)
    if options.prefill_costs is not None or options.decode_costs is not None:
        raise ConfigurationError(
            f"--prefill-costs and --decode-costs need --costs FILE, or --costs {RUNNING}, for the other nodes"
        )
    return None


def _read(source: Path | str) -> Mapping[Role, CostModel]:
    if isinstance(source, str):
        learnt = learnt_costs(choose_url(None if source == RUNNING else source))
        print(f"note: costs that the nodes have learnt. {learnt.note}", file=sys.stderr)
        return learnt.costs
    costs = read_costs(source)
    if source == EXAMPLE:
        print(
            f"note: the costs are an example: {costs.name}, not your nodes. `tandem profile` measures yours",
            file=sys.stderr,
        )
    return dict.fromkeys(Role, costs)


def costs_by_width(options: argparse.Namespace) -> CostsByWidth:
    costs = _by_width("--costs", options.costs)
    for role, flag, sources in (
        (Role.PREFILL, "--prefill-costs", options.prefill_costs),
        (Role.DECODE, "--decode-costs", options.decode_costs),
    ):
        if sources is not None:
            costs[role] = _by_width(flag, sources)[role]
    return costs


def _by_width(flag: str, sources: Sequence[Path | str]) -> dict[Role, dict[Width, CostModel]]:
    found: dict[Role, dict[Width, CostModel]] = {role: {} for role in ENGINE_ROLES}
    for source in sources:
        of_roles = _read(source)
        for role, of_width in found.items():
            costs = of_roles[role]
            if costs.width in of_width:
                raise ConfigurationError(
                    f"{flag}: {source} is of nodes of {costs.width}, and so is another of the files: give one for each width"
                )
            of_width[costs.width] = costs
    return found


def check_widths(config: TandemConfig, costs: CostsByWidth) -> None:
    """A simulated node takes the times of its costs, whatever the settings say of its ranks: raises ConfigurationError if they ask for others."""
    for role, of_width in costs.items():
        pool = config.pools.of(role)
        asked = Width(pool.tensor_parallel, pool.pipeline_parallel)
        if pool.context_parallel > 1:
            raise ConfigurationError(
                f"the settings ask for {role.value} nodes whose ranks read prompts together (context_parallel), and no costs are of such nodes"
            )
        if asked.ranks > 1 and asked not in of_width:
            there = " and ".join(map(str, of_width))
            raise ConfigurationError(
                f"the settings ask for {role.value} nodes of {asked}, and the costs are of nodes of {there}: profile such a node"
            )


def add_traffic(parser: argparse.ArgumentParser) -> None:
    add = adder(parser.add_argument_group("traffic: a trace, or requests by chance"))
    add("--trace", "FILE", Path, "Mooncake's JSONL, Azure's CSV, or a node's scheduler trace")
    add("--requests", "N", int, "the first N of the trace (default: all of them)")
    add("--trace-speed", "X", 1.0, "play it X times as fast (%(default)s)")
    add("--trace-scale", "X", 1.0, "multiply all lengths by X (%(default)s)")
    add("--copies", "N", 1, "so many such crowds at once, each with prompts of its own (%(default)s)")
    add("--rate", "R", float, "by chance, R requests a second")
    add("--duration", "S", 60.0, "by chance, for S seconds (%(default)s)")
    add("--input", "TOKENS", 512, "of a prompt (%(default)s)")
    add("--output", "TOKENS", 64, "of an answer (%(default)s)")
    add("--spread", "R", 0.0, "lengths within ±R of these (%(default)s)")
    add("--prefix", "TOKENS", 0, "that prompts share, before --input (%(default)s)")
    add("--prefixes", "N", 1, "different ones (%(default)s)")
    add("--traffic-seed", "N", 0, "of everything by chance (%(default)s)")


def traffic_of(options: argparse.Namespace) -> PlayedTraffic:
    if (options.trace is None) == (options.rate is None):
        raise ConfigurationError("give the traffic by --trace FILE or by --rate R, one of the two")
    if options.traffic_seed < 0:
        raise ConfigurationError(f"--traffic-seed must not be negative, not {options.traffic_seed}")
    if options.trace is None:
        return SyntheticTraffic(
            options.rate,
            options.duration,
            options.input,
            options.output,
            options.spread,
            options.prefix,
            options.prefixes,
        ).make(options.traffic_seed)
    if options.requests is not None and options.requests < 1:
        raise ConfigurationError(f"--requests must be at least 1, not {options.requests}")
    played = RecordedTraffic(options.trace_speed, options.trace_scale, options.copies)
    return played.of(_recorded(options.trace, options.requests), options.traffic_seed)


def _recorded(file: Path, limit: int | None) -> Sequence[TraceRow]:
    """Reads a trace in one of the public formats, or a node's scheduler trace."""
    try:
        with file.open("rb") as lines:
            is_of_scheduler = b'"event"' in lines.readline(4096)
    except OSError as error:
        raise ConfigurationError(f"--trace {file} cannot be read: {error.strerror}") from error
    return rows_of_steps(TraceReader(file))[:limit] if is_of_scheduler else read_trace(file, limit)


def slo_of(options: argparse.Namespace, config: TandemConfig) -> tuple[TandemConfig, ServiceLevel]:
    """Returns the service level from --slo, and the configuration with it, so that the autoscaler keeps it too; without --slo, the one
    in the settings."""
    asked: ServiceLevel | None = options.slo
    if asked is None:
        return config, ServiceLevel(ttft=config.slo.ttft_s, itl=config.slo.inter_token_s)
    slo = config.slo
    if asked.ttft is not None:
        slo = msgspec.structs.replace(slo, ttft_s=asked.ttft)
    if (gap := asked.itl or asked.tpot) is not None:
        slo = msgspec.structs.replace(slo, inter_token_s=gap)
    return msgspec.structs.replace(config, slo=slo), asked


def money(text: str) -> Mapping[str, float]:
    """Parses the price of each role's nodes per hour, such as `prefill=2.5,decode=1`."""
    costs: dict[str, float] = {}
    roles = [role.value for role in ENGINE_ROLES]
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        try:
            costs[name] = float(value)
        except ValueError:
            costs[name] = -1.0
        if name not in roles or not 0 < costs[name] < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{pair.strip()!r} must be what a node of one of {', '.join(roles)} costs in an hour, such as prefill=2.5"
            )
    return costs
