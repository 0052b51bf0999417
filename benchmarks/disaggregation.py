"""What disaggregation gains: Tandem and vLLM on one machine, each disaggregated and aggregated.

    python -m benchmarks.disaggregation --quick
    python -m benchmarks.disaggregation --vllm DIR --peers FOLDER

DIR is a virtual environment with vLLM. FOLDER has the scripts that start vLLM: docs/performance.md says what they run.

Every system runs alone with all of the machine's cores; systems are started, measured and stopped in turn. Loads: a closed loop of 1, 4 and 8
users with prompts of 512 tokens and answers of 64; chats, alone and while prompts of 2,048 tokens arrive; prompts that share their first 1,000
tokens. Writes outcome.json, outcome.txt and outcome.png. If it was interrupted, the same command continues where it stopped; with more --runs
it adds runs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks.ending import exit_status
from benchmarks.side_by_side.experiment import Experiment
from benchmarks.side_by_side.loads import FULL, QUICK, cells_of
from benchmarks.side_by_side.outcome import ComparisonOutcome, judge
from benchmarks.side_by_side.processes import adopt_orphans
from benchmarks.side_by_side.resume import keep, resume
from benchmarks.side_by_side.show import draw_outcome, print_outcome
from benchmarks.side_by_side.systems import System, tandem_systems, vllm_systems
from tandem.base.errors import ConfigurationError
from tandem.cluster.models.store import prepare_model
from tandem.cluster.saving import check_picture, results_folder, save_picture
from tandem.loadgen.metrics import parse_service_level
from tandem.loadgen.report import MachineDescription
from tandem.loadgen.vocabulary import TextVocabulary, load_tokenizer

_TABLE_WIDTH = 160


def main() -> int:
    options = _parse()
    console = Console(stderr=True)
    return exit_status(lambda: _run(options, console), console)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="(%(default)s)")
    parser.add_argument(
        "--vllm", type=Path, metavar="DIR", help="a virtual environment with vLLM: examine it too"
    )
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="the scripts that start vLLM")
    parser.add_argument("--systems", nargs="+", metavar="KEY", help="only these (all that there are)")
    parser.add_argument("--runs", type=int, metavar="N", help="(3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="fewer requests: minutes, not an hour")
    parser.add_argument(
        "--slo", default="ttft=1s,itl=100ms", metavar="LIMITS", help="of the goodput (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--out", type=Path, default=Path("results/disaggregation"), metavar="FOLDER", help="(%(default)s)"
    )
    return parser.parse_args()


def _run(options: argparse.Namespace, console: Console) -> int:
    plan = QUICK if options.quick else FULL
    runs = options.runs if options.runs is not None else (1 if options.quick else 3)
    if runs < 1:
        raise ConfigurationError(f"--runs must be at least 1, not {runs}")
    slo = parse_service_level(options.slo)
    model = Path(prepare_model(options.model, lambda what, share: None).path)
    systems = _systems(options, model)
    folder = results_folder(options.out)
    picture = folder / "outcome.png"
    check_picture(picture, "--out")
    fresh = ComparisonOutcome(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=MachineDescription.here(),
        command=shlex.join(["python", "-m", "benchmarks.disaggregation", *sys.argv[1:]]),
        settings={"model": model.name, "runs": runs, "seed": options.seed, "slo": str(slo), "plan": plan},
        titles={system.key: system.title for system in systems},
        cells=cells_of(plan),
    )
    kept = resume(folder, fresh)
    outcome = kept.outcome
    adopt_orphans()
    vocabulary = TextVocabulary(load_tokenizer(model))
    experiment = Experiment(systems, plan, vocabulary, slo, outcome, kept.gaps, folder, console)
    experiment.run(runs, options.seed, lambda: keep(folder, kept))

    outcome.floors = judge(outcome)
    print_outcome(Console(width=_TABLE_WIDTH), outcome)
    with (folder / "outcome.txt").open("w") as text:
        print_outcome(Console(file=text, width=_TABLE_WIDTH), outcome)
    save_picture(draw_outcome(outcome, experiment.gaps), picture)
    console.print(f"In {folder}: outcome.json, outcome.txt, outcome.png; each system's output beside them.")
    return 0 if outcome.examined else 1


def _systems(options: argparse.Namespace, model: Path) -> list[System]:
    systems = tandem_systems(model)
    if options.vllm is not None:
        if options.peers is None:
            raise ConfigurationError("--vllm needs --peers FOLDER: the scripts that start it")
        systems += vllm_systems(model, options.vllm.resolve(), options.peers.resolve())
    if options.systems is None:
        return systems
    unknown = set(options.systems) - {system.key for system in systems}
    if unknown:
        known = ", ".join(system.key for system in systems)
        raise ConfigurationError(f"--systems {' '.join(sorted(unknown))}: there are only {known}")
    return [system for system in systems if system.key in options.systems]


if __name__ == "__main__":
    sys.exit(main())
