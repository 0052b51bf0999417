"""What disaggregation gains: Tandem and vLLM on one machine, each disaggregated and aggregated.

    python -m benchmarks.disaggregation --quick
    python -m benchmarks.disaggregation --vllm DIR --peers FOLDER

DIR is a virtual environment with vLLM. FOLDER has the scripts that start vLLM: docs/performance.md says what they run.

Every system runs alone with all of the machine's cores; systems are started, measured and stopped in turn. Loads: a closed loop of 1, 4 and 8
users with prompts of 512 tokens and answers of 64; chats, alone and while prompts of 2,048 tokens arrive; prompts that share their first 1,000
tokens. Writes disaggregation.json and disaggregation.txt, and each system's output.
"""

from __future__ import annotations

from rich.console import Console

from benchmarks.lib.harness import parser_of, report, run
from benchmarks.lib.processes import adopt_orphans
from benchmarks.lib.servers import add_system_flags, asked_systems, model_folder
from benchmarks.side_by_side.experiment import Experiment
from benchmarks.side_by_side.loads import FULL, QUICK, cells_of
from benchmarks.side_by_side.outcome import ComparisonOutcome, headlines, judge, shown
from tandem.base.errors import ConfigurationError
from tandem.cluster.saving import results_folder
from tandem.loadgen.metrics import parse_service_level
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
    plan = QUICK if options.quick else FULL
    runs = options.runs if options.runs is not None else (1 if options.quick else 3)
    if runs < 1:
        raise ConfigurationError(f"--runs must be at least 1, not {runs}")
    slo = parse_service_level(options.slo)
    model = model_folder(options.model)
    systems = asked_systems(options, model)
    outcome = ComparisonOutcome(
        settings={"model": model.name, "runs": runs, "seed": options.seed, "slo": str(slo), "plan": plan},
        titles={system.key: system.title for system in systems},
        cells=cells_of(plan),
    )
    adopt_orphans()
    vocabulary, console = TextVocabulary(load_tokenizer(model)), Console(stderr=True)
    experiment = Experiment(plan, vocabulary, slo, outcome, results_folder(options.out), console)
    experiment.run(systems, runs, options.seed)
    floors = headlines(outcome) + judge(outcome)
    return report(options, outcome, *shown(outcome), floors=floors, failed=not outcome.examined, width=160)


if __name__ == "__main__":
    run(main)
