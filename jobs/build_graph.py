"""Build the decoding graph and the grammars of a run, once (003 II-A2).

megahour build_graph --recipe demo --run runs/demo
"""

from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.run_table import BUILD_GRAPH
from training.evaluate.graph_building import build_graphs
from training.settings.decoding import rescoring_orders


def run(job: Job) -> StepResults:
    """Build and store the graph."""
    recipe = job.recipe
    orders = rescoring_orders(recipe.evaluation, recipe.tuning, recipe.targets.lattices)
    return [build_graphs(*job.place, recipe.evaluation, orders)]


STEP = Step(
    name=BUILD_GRAPH,
    description="Build the graph that all searches of the run share: words of a small n-gram model "
    "(evaluation.first_pass), by the senones of the alignment. The grammars of the models that "
    "rescore its lattices, one for each n-gram order that evaluation and tuning may choose, are "
    "stored beside it. Hosts keep a verified copy of each, which all their workers map.",
    run=run,
)

if __name__ == "__main__":
    main(STEP)
