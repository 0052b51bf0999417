"""What `tandem serve` says when it can answer."""

from __future__ import annotations

import json

from rich.markup import escape

from cluster.config import TandemConfig
from cluster.control import ClusterView
from cluster.describe import counted
from cluster.pools.controller_host import Account


def ready_lines(
    account: Account, view: ClusterView, config: TandemConfig, logs: str, seconds: float, *, detached: bool
) -> list[str]:
    url, name = account.url, account.model
    pools = ", ".join(counted(pool.ready, f"{pool.role.value} node") for pool in view.pools if pool.wanted)
    end = ["look:    tandem status", "stop:    tandem down"] if detached else ["stop:    Ctrl-C"]
    return [
        "",
        f"[bold green]ready[/] after {seconds:.1f} s: {escape(name)} on {pools}",
        f"API:     {url}/v1",
        f"try it:  {escape(curl_line(url, name, with_key=bool(config.router.api_keys)))}",
        f"or:      tandem chat --url {url}",
        f"logs:    {logs}",
        *end,
        "",
    ]


def curl_line(url: str, model: str, *, with_key: bool) -> str:
    question = {"role": "user", "content": "What is the capital of France?"}
    # Without chance, so that a small model's first answer is its best one.
    body = json.dumps({"model": model, "messages": [question], "temperature": 0})
    quoted = body.replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $TANDEM_API_KEY"' if with_key else ""
    return f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"
