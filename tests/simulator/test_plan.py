"""The planner finds the cheapest cluster that is enough, says why, and draws it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.cli import main
from tandem.cluster.config import PoolConfig, PoolsConfig
from tandem.loadgen.metrics import ServiceLevel
from tandem.loadgen.traces import TraceRow
from tandem.simulator.costs import Width
from tandem.simulator.outcome import NodeLoad, SimulationReport
from tandem.simulator.planner import Plan, Planner, PoolSizes, Widths
from tandem.simulator.simulation import simulate
from tandem.wire.nodes import Role
from tests.simulator.worlds import a_setup, node_costs

EQUAL = {"prefill": 1.0, "decode": 1.0, "aggregated": 1.0}
LEAST: dict[Role, dict[Width, int]] = {role: {Width(): 1} for role in Role}


def a_report(attainment: float, misses: Mapping[str, int]) -> SimulationReport:
    load = NodeLoad("node-1", "decode", 1.0, 0.5, 1, 0, 0, 1, 0, 0.2)
    return SimulationReport(
        100, 100, 0, 0, 1.0, 1, 0, 1, 1.0, None, None, None, None, "", attainment, attainment, 0.0, [load], {}, [], 0,
        {}, {}, dict(misses), given_up=attainment < 0.99,
    )  # fmt: skip


class NeedyTraffic:
    """A cluster that serves well from that many nodes of each kind on."""

    def __init__(self, prefill: int, decode: int, aggregated: int) -> None:
        self.needs = PoolSizes(prefill, decode, aggregated)
        self.asked: list[PoolSizes] = []

    def __call__(self, layout: PoolSizes, settings: Mapping[str, str], faster: float) -> SimulationReport:
        self.asked.append(layout)
        if layout.aggregated:
            return self.answer(layout.aggregated, self.needs.aggregated, faster, "itl")
        if layout.prefill < self.needs.prefill * faster:
            return self.answer(layout.prefill, self.needs.prefill, faster, "ttft")
        return self.answer(layout.decode, self.needs.decode, faster, "itl")

    @staticmethod
    def answer(size: int, need: int, faster: float, cause: str) -> SimulationReport:
        share = min(1.0, size / (need * faster))
        return a_report(share, {} if share == 1.0 else {cause: 7})


def plan_for(traffic: NeedyTraffic, money: Mapping[str, float], most: int = 64) -> Plan:
    return Planner(traffic, money, 0.99, most, LEAST).plan()


SIZES = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(
    prefill=SIZES,
    decode=SIZES,
    aggregated=SIZES,
    prices=st.tuples(st.floats(0.5, 5), st.floats(0.5, 5), st.floats(0.5, 5)),
)
def test_the_cheapest_cluster_that_is_enough_is_found(
    prefill: int, decode: int, aggregated: int, prices: tuple[float, float, float]
) -> None:
    money = dict(zip(("prefill", "decode", "aggregated"), prices, strict=True))
    traffic = NeedyTraffic(prefill, decode, aggregated)
    chosen = plan_for(traffic, money).chosen
    separate, together = PoolSizes(prefill, decode), PoolSizes(aggregated=aggregated)
    assert chosen.cost == pytest.approx(min(separate.cost(money), together.cost(money)))
    assert len(traffic.asked) < 60


def test_it_says_why_and_what_gives_way_first() -> None:
    plan = plan_for(NeedyTraffic(3, 2, 9), {"prefill": 2.0, "decode": 1.0, "aggregated": 2.0})
    assert plan.chosen.layout == PoolSizes(3, 2)
    said = " | ".join(plan.why)
    assert "9 aggregated keep the limits too, for 18.00 an hour, not 8.00" in said
    assert "with 2 prefill nodes: the first token comes too late for 7 requests" in said
    assert "with 1 decode node: tokens come too slowly for 7 requests" in said
    assert plan.breaks_first == "at 1.1 times the traffic: the first token comes too late for 7 requests"


class WideTraffic:
    """Prompts need nodes of two ranks, whatever their number; answers are written by 6 nodes of one rank, or 4 of two."""

    def __init__(self) -> None:
        self.asked: list[PoolSizes] = []

    def __call__(self, layout: PoolSizes, settings: Mapping[str, str], faster: float) -> SimulationReport:
        self.asked.append(layout)
        if layout.aggregated or layout.widths.prefill.ranks < 2:
            return a_report(0.5, {"ttft": 3})
        need = {1: 6, 2: 4}[layout.widths.decode.ranks]
        return NeedyTraffic.answer(layout.decode, need, faster, "itl")


def test_widths_are_compared_and_each_rank_has_its_price() -> None:
    widths = {Width(1): 1, Width(2): 1}
    money = {"prefill": 3.0, "decode": 1.0, "aggregated": 3.0}
    plan = Planner(WideTraffic(), money, 0.99, 16, dict.fromkeys(Role, widths)).plan()
    layout = plan.chosen.layout
    assert (str(layout), plan.chosen.cost) == ("1 prefill (TP 2), 6 decode", 12.0)
    assert "of other widths 1 prefill (TP 2), 4 decode (TP 2) keep the limits, for 14.00 an hour" in plan.why
    given = PoolsConfig(decode=PoolConfig(nodes=None, max=9, scheduler={"max_num_seqs": 8}))
    pools = layout.pools(given)
    assert (pools.prefill.nodes, pools.prefill.tensor_parallel) == (1, 2)
    assert pools.decode == PoolConfig(nodes=6, scheduler={"max_num_seqs": 8}), "what the pool sets for itself stays"


def test_a_width_that_must_cost_more_is_not_tried() -> None:
    traffic = NeedyTraffic(2, 2, 2)
    least = {role: {Width(1): 1, Width(8): 1} for role in Role}
    plan = Planner(traffic, EQUAL, 0.99, 64, least).plan()
    assert plan.chosen.layout == PoolSizes(aggregated=2)
    assert all(layout.widths == Widths() for layout in traffic.asked)


def test_limits_that_no_size_keeps_are_said_to_be_so_and_no_more_nodes_are_tried_than_were_allowed() -> None:
    """Also where the work alone needs more of them."""
    for needs, least in ((100, LEAST), (20, {role: {Width(): 20} for role in Role})):
        traffic = NeedyTraffic(needs, needs, needs)
        plan = Planner(traffic, EQUAL, 0.99, 8, least).plan()
        assert max(max(layout.prefill, layout.decode, layout.aggregated) for layout in traffic.asked) == 8
        assert plan.chosen is None
        (why,) = plan.why
        assert why.startswith("no cluster of up to 8 nodes of a role keeps the limits for 99% of the requests")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node.json").write_bytes(msgspec.json.encode(node_costs()))
    return tmp_path


TRAFFIC = [
    "--rate", "6", "--duration", "8", "--input", "700", "--output", "15", "--slo", "ttft=150ms,itl=80ms",
]  # fmt: skip
PRICES = ["--cost", "prefill=2,decode=1"]


def test_the_command_plans_says_what_to_take_and_draws(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--costs", "node.json", *TRAFFIC, *PRICES, "--attainment", "0.9", "--most-nodes", "8"]
    assert main(["plan", *given]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in ("take ", "in tandem.yaml: pools: {", "an hour", "what gives way first", "clusters were simulated"):
        assert words in said
    assert main(["plan", *given, "--picture", "plan.svg", "-o", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["chosen"]["attainment"] >= 0.9
    smaller = [trial for trial in plan["trials"] if trial["cost"] < plan["chosen"]["cost"]]
    assert all(trial["given_up"] or trial["attainment"] < 0.9 for trial in smaller)
    drawn = ElementTree.parse(folder / "plan.svg").getroot()
    whole = [trial for trial in plan["trials"] if not trial["given_up"]]
    circles = drawn.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2 + len(whole), "one for each, and two that explain the colours"


@pytest.mark.parametrize("command", [["plan", *PRICES, "--most-nodes", "4"], ["simulate"]], ids=lambda it: it[0])
def test_the_example_works_at_once_and_is_called_one(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    load = ["--rate", "0.2", "--duration", "20", "--input", "200", "--output", "20", "-o", "json"]
    assert main([*command, "--costs", "example", *load]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)
    assert "the costs are an example: SmolLM2-135M on one core of a Xeon" in told.err
    assert "not your nodes" in told.err
    assert main([*command, "--costs", "node.json", *load]) == 0
    assert "example" not in capsys.readouterr().err


def test_the_command_compares_widths(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here a node of one rank reads prompts too slowly for the limits, however many there are."""
    wide = msgspec.structs.replace(node_costs(), tensor_parallel=2)
    seconds = [[value * 20 for value in row] for row in wide.prefill.seconds]
    narrow = msgspec.structs.replace(
        wide, tensor_parallel=1, prefill=msgspec.structs.replace(wide.prefill, seconds=seconds)
    )
    for name, costs in (("wide.json", wide), ("narrow.json", narrow)):
        (folder / name).write_bytes(msgspec.json.encode(costs))
    given = [*TRAFFIC, *PRICES, "--attainment", "0.9", "--most-nodes", "4", "-o", "json"]
    assert main(["plan", "--costs", "narrow.json", "wide.json", *given]) == 0
    layout = json.loads(capsys.readouterr().out)["chosen"]["layout"]
    reads = "aggregated" if layout["aggregated"] else "prefill"
    assert layout["widths"][reads]["tensor_parallel"] == 2
    assert main(["plan", "--costs", "wide.json", "wide.json", *given]) == 1
    assert "give one for each width" in capsys.readouterr().err


@pytest.mark.parametrize(
    "traffic",
    [
        ["--trace", "trace", "--requests", "2", "--trace-speed", "2", "--trace-scale", "0.5", "--copies", "2"],
        ["--rate", "2", "--duration", "3", "--prefix", "64", "--prefixes", "2", "--spread", "0.5", "--traffic-seed", "7"],
    ],
)  # fmt: skip
def test_the_command_plans_for_any_traffic_with_costs_of_each_role(
    folder: Path, capsys: pytest.CaptureFixture[str], traffic: list[str]
) -> None:
    row = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    (folder / "trace").write_text(row * 3)
    files = ["--costs", "node.json", "--prefill-costs", "node.json", "--decode-costs", "node.json"]
    limits = ["--slo", "ttft=2s,itl=1s", "--most-nodes", "2", *PRICES, "-o", "json"]
    assert main(["plan", *files, *traffic, *limits]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["attainment"] == 1.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([*PRICES, "--attainment", "0"], "--attainment must be above 0"),
        ([*PRICES, "--most-nodes", "0"], "--most-nodes must be from 1 to 10000"),
        (
            [*PRICES, "--set", "pools.decode.tensor_parallel=2"],
            "ask for decode nodes of TP 2, and the costs are of nodes of TP 1",
        ),
        ([*PRICES, "--set", "pools.decode.context_parallel=2"], "context_parallel"),
        ([*PRICES, "--picture", "plan.png"], "--picture must end in .svg"),
        ([*PRICES, "--picture", "no-folder/plan.svg"], "no-folder/plan.svg cannot be written: name another file"),
        (["--cost", "decode=1"], "--cost must name what a prefill node costs"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    assert main(["plan", "--costs", "node.json", *TRAFFIC, *given]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_prices_are_numbers_above_0(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for prices in ("prefill=0,decode=1", "prefill=-2", "router=1", "prefill=cheap", "prefill=inf"):
        with pytest.raises(SystemExit):
            main(["plan", "--costs", "node.json", *TRAFFIC, "--cost", prices])
        assert "costs in an hour, such as prefill=2.5" in capsys.readouterr().err


def test_a_cluster_that_was_given_up_is_not_said_to_serve_at_most_what_it_had_served() -> None:
    """The first prompts are too long, and all others would be within the limits."""
    rows = [TraceRow(2.0 * index, 3000 if index < 3 else 100, 5) for index in range(30)]
    setup = a_setup(rows, slo=ServiceLevel(ttft=0.1))
    early, whole = simulate(msgspec.structs.replace(setup, give_up_below=0.99)), simulate(setup)
    assert early.given_up
    assert early.attainment is not None
    assert whole.attainment is not None
    assert early.attainment < whole.attainment == 0.9
    plan = Planner(lambda *_: early, EQUAL, 0.99, 2, LEAST).plan()
    (why,) = plan.why
    assert f"{early.attainment:.1%} had kept them when it was given up" in why
