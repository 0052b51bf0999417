"""`benchmarks.failover` on a cluster of five hosts with a link of some rate between them: a decode host's process is killed.

    python tests/hosts/failover_on_hosts.py [--rate 10gbit] [--tokens 7000]

As root. All hosts share this machine's cores, so what computes in one slows the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from fault_cluster import FaultCluster
from lab import ROOT, Lab, in_laptops_network
from serving import give_model
from tools import install_absent, why_impossible

from tandem.cluster.models.store import find_model_here

SETTINGS = {
    "model": {"dtype": "bfloat16"},
    "cache": {"memory_bytes": "256MiB", "mirror": True, "tiers": [{"cpu": "512MiB"}]},
}
PATIENCE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="10gbit")
    parser.add_argument("--tokens", type=int, default=7000)
    options = parser.parse_args()
    install_absent()
    if reason := why_impossible():
        print(reason, file=sys.stderr)
        return 1
    source = Path(find_model_here("smollm2", lambda what, share: None))
    with (
        tempfile.TemporaryDirectory(prefix="tandem-lab-") as folder,
        Lab(Path(folder), hosts=5, ssh=False, boot_ids=True) as lab,
        FaultCluster(lab, give_model(lab, source), SETTINGS) as cluster,
    ):
        cluster.limit_links(options.rate)
        words = ("-m", "benchmarks.failover", "--url", cluster.url, "--tokens", str(options.tokens))
        command = in_laptops_network(sys.executable, *words)
        return subprocess.run(command, cwd=ROOT, timeout=PATIENCE_S, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
