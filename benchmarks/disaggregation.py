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
import sys

from rich.console import Console

from benchmarks.lib.command import command_line, exit_status, now, parser_of, write_text
from benchmarks.lib.processes import adopt_orphans
from benchmarks.lib.servers import add_system_flags, asked_systems, model_folder
from benchmarks.side_by_side.experiment import Experiment
from benchmarks.side_by_side.loads import FULL, QUICK, cells_of
from benchmarks.side_by_side.outcome import ComparisonOutcome, judge
from benchmarks.side_by_side.resume import keep, resume
from benchmarks.side_by_side.show import draw_outcome, print_outcome
from tandem.base.errors import ConfigurationError
from tandem.cluster.saving import check_picture, results_folder, save_picture
from tandem.loadgen.metrics import parse_service_level
from tandem.loadgen.report import MachineDescription
from tandem.loadgen.vocabulary import TextVocabulary, load_tokenizer


def main() -> int:
    parser = parser_of(__doc__, out="results/disaggregation")
    add_system_flags(parser)
    parser.add_argument("--runs", type=int, metavar="N", help="(3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="fewer requests: minutes, not an hour")
    parser.add_argument(
        "--slo", default="ttft=1s,itl=100ms", metavar="LIMITS", help="of the goodput (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    options = parser.parse_args()
    console = Console(stderr=True)
    return exit_status(lambda: _run(options, console), console)


def _run(options: argparse.Namespace, console: Console) -> int:
    plan = QUICK if options.quick else FULL
    runs = options.runs if options.runs is not None else (1 if options.quick else 3)
    if runs < 1:
        raise ConfigurationError(f"--runs must be at least 1, not {runs}")
    slo = parse_service_level(options.slo)
    model = model_folder(options.model)
    systems = asked_systems(options, model)
    folder = results_folder(options.out)
    picture = folder / "outcome.png"
    check_picture(picture, "--out")
    fresh = ComparisonOutcome(
        made_at=now(),
        machine=MachineDescription.here(),
        command=command_line("disaggregation"),
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
    write_text(lambda to: print_outcome(to, outcome), folder / "outcome.txt", 160)
    save_picture(draw_outcome(outcome, experiment.gaps), picture)
    console.print(f"In {folder}: outcome.json, outcome.txt, outcome.png; each system's output beside them.")
    return 0 if outcome.examined else 1


if __name__ == "__main__":
    sys.exit(main())
