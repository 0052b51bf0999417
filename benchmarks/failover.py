"""A long conversation whose decode node is killed: for how long its stream pauses, and how much is computed again.

    python -m benchmarks.failover [--model NAME] [--tokens 7000] [--ranks N] [--url URL] [--json FILE]

Starts `tandem serve` with one prefill node and two decode nodes, with `cache.mirror` and without. While a prompt of the given length is answered,
the process of its decode node is killed. Everything is on one machine, so KV travels over its memory.

With `--ranks` there are two aggregated nodes of that many ranks, and one rank of the answering node is killed, which ends the node. `--url` names
a running cluster with `cache.mirror` whose processes are visible on this machine: `python tests/hosts/failover_on_hosts.py` makes one of hosts
with a link of 10 Gbit between them, and runs this benchmark on it.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.processes import adopt_orphans, wait_for
from benchmarks.lib.servers import model_folder, running, tandem_system
from benchmarks.lib.tables import at_most, table_of

ANSWER, KILLED_AT = 240, 120
PATIENCE_S = 240.0
MAX_ELSEWHERE_S = 3.0  # after a rank was killed: until the node's requests continue on another node
RANK = b"tandem.node.ranks.process"
# With a mirror: the stream continues within a second, and less than this share is computed again.
MAX_STILL_S, MAX_AGAIN = 1.0, 0.02
SETTINGS = """
cache: {{memory_bytes: 256MiB, mirror: {mirror}, tiers: [{{cpu: 512MiB}}]}}
router: {{local_prefill: never}}
"""
WIDE_SETTINGS = """
pools: {{aggregated: {{tensor_parallel: {ranks}}}}}
cache: {{memory_bytes: 256MiB}}
"""


COLUMNS = {
    "": "{what}",
    "stream stands still": "{still_s:.2f} s",
    "until another node has it": "{elsewhere_s:.2f} s",
    "usually": "{usual_s:.3f} s",
    "computed again": "{computed_again} of {of_tokens} tokens",
}


class Failover(msgspec.Struct):
    what: str
    still_s: float  # from the kill to the next token
    elsewhere_s: float  # the part of it until another node had the request
    usual_s: float  # between two tokens: the median before the kill
    computed_again: int  # tokens, on all nodes
    of_tokens: int  # the length of the conversation


@contextmanager
def serving(model: str, settings: str, pools: dict[str, int]) -> Iterator[httpx.Client]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tandem.yaml").write_text(settings)
        flags = [word for pool, size in pools.items() for word in (f"--{pool}", str(size))]
        flags += ["--config", str(folder / "tandem.yaml")]
        with (
            running(tandem_system("tandem", "Tandem", model_folder(model), *flags), folder) as started,
            httpx.Client(base_url=started.system.url, timeout=PATIENCE_S, trust_env=False) as client,
        ):
            count = sum(pools.values())
            wait_for(lambda: len(nodes(client)) >= count, PATIENCE_S, "the nodes did not become ready")
            yield client


def nodes(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/cluster").raise_for_status().json()["nodes"]
    return [node for node in found if node["state"] == "ready"]


def listener(endpoint: str) -> int:
    """Returns the process that listens at this endpoint, in any network namespace of this machine."""
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    wanted = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{int(port):04X}"
    networks: dict[str, set[str]] = {}  # the sockets that listen there, by network
    for process in Path("/proc").glob("[0-9]*"):
        try:
            network = os.readlink(process / "ns" / "net")
            if network not in networks:
                rows = [row.split() for row in (process / "net" / "tcp").read_text().splitlines()[1:]]
                networks[network] = {f"socket:[{row[9]}]" for row in rows if row[1] == wanted and row[3] == "0A"}
            if any(os.readlink(file) in networks[network] for file in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue  # the process has ended
    raise LookupError(f"no process listens at {endpoint}")


def rank_of(node: int) -> int:
    """Returns the process of one of the node's ranks, which is a child of the node's process."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            if parent == node and RANK in (status.parent / "cmdline").read_bytes():
                return int(status.parent.name)
        except OSError:
            continue  # the process has ended
    raise LookupError(f"process {node} has started no rank")


def served(model: str, tokens: int, *, mirror: bool = False, ranks: int = 1) -> Failover:
    if ranks > 1:
        what, settings, pools = "a rank", WIDE_SETTINGS.format(ranks=ranks), {"aggregated": 2}
    else:
        what, settings = "mirror" if mirror else "no mirror", SETTINGS.format(mirror=str(mirror).lower())
        pools = {"prefill": 1, "decode": 2}
    with serving(model, settings, pools) as client:
        return measure(client, what, tokens, mirror=mirror, ranks=ranks)


def measure(client: httpx.Client, what: str, tokens: int, *, mirror: bool = False, ranks: int = 1) -> Failover:
    draw = random.Random(1)
    name = client.get("/v1/models").json()["data"][0]["id"]
    body = {
        "model": name, "prompt": [draw.randrange(1000, 40_000) for _ in range(tokens)], "max_tokens": ANSWER,
        "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    arrived: list[float] = []
    killed_at, killed_unix_s, killed, survivors, answer_id = 0.0, 0.0, "", {}, ""
    headers = {"x-tandem-trace": "1"}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as events:
        for line in events.iter_lines():
            if not answer_id and line.startswith("data: {"):
                answer_id = json.loads(line[6:])["id"]
            choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
            new = len(choices[0].get("token_ids", [])) if choices else 0
            arrived += [time.monotonic()] * new
            if len(arrived) >= KILLED_AT and not killed:
                (target,) = [node for node in nodes(client) if node["role"] != "prefill" and node["running"]]
                killed = target["node_id"]
                survivors = {node["node_id"]: node for node in nodes(client) if node["node_id"] != killed}
                pid = listener(target["request_endpoint"])
                pid = rank_of(pid) if ranks > 1 else pid
                killed_at, killed_unix_s = time.monotonic(), time.time()
                os.kill(pid, signal.SIGKILL)
    if len(arrived) != ANSWER:
        raise RuntimeError(f"{len(arrived)} of {ANSWER} tokens came")
    # Tokens that the node sent before it died may still arrive. Its successor's first token comes after the longest gap.
    after = [moment for moment in arrived if moment > killed_at]
    gaps = [(later - earlier, earlier) for earlier, later in itertools.pairwise([killed_at, *after])]
    _, began = max(gaps)
    still_s = max(gaps)[0] + (began - killed_at if began > killed_at else 0.0)
    had = tokens + sum(moment <= began for moment in arrived)
    time.sleep(1.5)  # until every node has reported its counters
    loaded = computed = 0
    for node in nodes(client):
        before = survivors.get(node["node_id"], {"counters": {}})["counters"]
        computed += node["counters"]["prompt_tokens_computed"] - before.get("prompt_tokens_computed", 0)
        if mirror and node["node_id"] != killed and node["role"] != "prefill":
            loaded = max(loaded, node["tiers"][0]["found_tokens"])
    between = sorted(later - earlier for earlier, later in itertools.pairwise(arrived[:KILLED_AT]))
    again = had - loaded if mirror else computed + had - tokens
    trace = client.get(f"/traces/{answer_id}").raise_for_status().json()
    offset = trace["began_unix_s"] - trace["began"] - killed_unix_s
    begun = [part["spans"][0][1] + offset for part in trace["nodes"] if part["spans"]]
    elsewhere_s = min(after for after in begun if after > 0)
    return Failover(what, still_s, elsewhere_s, between[len(between) // 2], again, had)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--url", help="of a cluster that serves already, with cache.mirror")
    options = parser.parse_args()
    adopt_orphans()
    if options.url is not None:
        with httpx.Client(base_url=options.url, timeout=PATIENCE_S, trust_env=False) as client:
            found = [measure(client, "mirror", options.tokens, mirror=True)]
    elif options.ranks > 1:
        found = [served(options.model, options.tokens, ranks=options.ranks)]
    else:
        found = [served(options.model, options.tokens, mirror=mirror) for mirror in (True, False)]
    first = found[0]
    floors = [at_most("its requests go on", first.still_s, MAX_ELSEWHERE_S, "s")]
    if options.ranks == 1:
        again = first.computed_again / first.of_tokens
        floors = [
            at_most("with a mirror: the stream stands still", first.still_s, MAX_STILL_S, "s"),
            at_most("with a mirror: computed again, of the conversation", again, MAX_AGAIN),
        ]
    table = table_of("A node is killed in the middle of an answer", found, COLUMNS)
    return report(options, found, table, floors=floors)


if __name__ == "__main__":
    run(main)
