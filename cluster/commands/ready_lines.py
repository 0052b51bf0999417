"""What `tandem serve` prints when the cluster answers."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.markup import escape

from tandem.cluster.commands.progress import StartStep
from tandem.cluster.config import DEFAULT_NAME, TandemConfig
from tandem.cluster.control import ClusterView
from tandem.cluster.describe import counted
from tandem.cluster.pools.controller_host import ClusterAccount


def ready_lines(
    account: ClusterAccount, view: ClusterView, config: TandemConfig, logs: str, seconds: float, *, detached: bool
) -> list[str]:
    url, name = escape(account.url), account.model
    pools = ", ".join(counted(pool.ready, f"{pool.role.value} node") for pool in view.pools if pool.wanted)
    tandem = escape(own_command())
    name_flag = "" if config.name == DEFAULT_NAME else f" --name {config.name}"
    end = (
        [f"look:    {tandem} status{name_flag}", f"stop:    {tandem} down{name_flag}"]
        if detached
        else ["stop:    Ctrl-C"]
    )
    return [
        "",
        f"[bold green]ready[/] after {seconds:.1f} s: {escape(name)} on {pools}",
        f"API:     {url}/v1",
        f"try it:  {escape(curl_line(account.url, name, with_key=bool(config.router.api_keys)))}",
        f"or:      {tandem} chat --url {url}",
        f"logs:    {logs}",
        *end,
        "",
    ]


def timing_lines(steps: Sequence[StartStep]) -> list[str]:
    """What a start did when, for `tandem serve --timings`. A process that begins has been started and has imported its code."""
    width = max((len(one.name) for one in steps), default=0)
    return [
        "what it waited for:",
        *(
            f"{one.began_s:6.2f} s  {escape(one.name):{width}}  {one.seconds:6.2f} s  {escape(one.what)}"
            for one in steps
        ),
    ]


def ready_values(account: ClusterAccount, view: ClusterView, logs: str, seconds: float) -> dict[str, object]:
    """Returns the same for programs: `tandem serve -o json`."""
    return {
        "url": account.url,
        "api": f"{account.url}/v1",
        "model": account.model,
        "deployment": account.deployment,
        "nodes": {pool.role.value: pool.ready for pool in view.pools if pool.wanted},
        "seconds": round(seconds, 1),
        "logs": logs,
    }


def own_command(environ: Mapping[str, str] = os.environ) -> str:
    """Returns what to type for `tandem`: its path, if no shell would find it because the environment is not activated."""
    script = Path(sys.prefix) / "bin" / "tandem"
    if shutil.which("tandem", path=environ.get("PATH")) or not script.exists():
        return "tandem"
    here = Path.cwd()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


def curl_line(url: str, model: str, *, with_key: bool) -> str:
    question = {"role": "user", "content": "What is the capital of France?"}
    # Greedy, because a small model's most likely answer is its best one.
    body = json.dumps({"model": model, "messages": [question], "temperature": 0})
    quoted = body.replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $TANDEM_API_KEY"' if with_key else ""
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"
