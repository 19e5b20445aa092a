"""Align the labelled data to senones (003 VII-C2).

megahour align --recipe demo --run runs/demo
"""

from functools import partial

from infra.log_lines import log
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.cli.spark_steps import distribute_on_spark
from jobs.cli.training_steps import arguments_with_device, own_device, training_ranks
from jobs.run_table import ALIGN
from pipeline.runs.manifest import Manifest, subsets_of_run
from pipeline.runs.names import (
    ALIGNER,
    DEV,
    DEV_ALIGNMENT_STEP,
    LABELLED,
    features_step,
    realignment_rounds,
)
from pipeline.steps.selection.buckets import subsets_of
from pipeline.steps.selection.select import metadata_uri
from training.align.bootstrap import bootstrap, check_transcripts
from training.align.network_alignment import AlignmentSettings, read_tree, realign
from training.decode.corpus_lexicon import CorpusLexicon
from training.distributed import process_group
from training.fit.model_specs import aligner_fit
from training.fit.train_model import fit_model
from training.settings.recipe import check_phones, check_ranks, check_senones


def run(job: Job) -> StepResults:
    """Bootstrap an alignment; in each round train a network on the last one, and realign by it."""
    recipe = job.recipe
    device = own_device(job.arguments.device)
    features = features_step(LABELLED)
    is_there = job.has(features)
    if not is_there and LABELLED not in subsets_of(job.store, job.corpus_uri):
        raise ValueError(
            f"{metadata_uri(job.corpus_uri, LABELLED)} has no metadata: need transcribed "
            "speech to align; without any, a run ends with its features"
        )
    # Now, not after the hours of the bootstrap.
    check_ranks(recipe, ALIGNER, 1)
    job.manifest(features)
    rule = recipe.corpus.unknown_words
    lexicon = CorpusLexicon.read(job.store, job.corpus_uri, rule).parse()
    check_phones(recipe, len(lexicon.phones))
    has_dev = DEV in subsets_of_run(job.store, job.run_uri, features_step)
    if has_dev and not job.has(DEV_ALIGNMENT_STEP):
        check_transcripts(job.store, job.run_uri, DEV, lexicon, recipe.loss_budget)
    versions = recipe.alignment.versions
    bootstrapped = bootstrap(
        job.store,
        job.run_uri,
        job.corpus_uri,
        recipe.bootstrap,
        recipe.senones,
        recipe.loss_budget,
        versions,
        rule,
    )
    check_senones(recipe, read_tree(job.store, job.run_uri).num_senones)
    if said := unreached_senones(bootstrapped.manifest):
        log(said)
    # A cluster's hosts need not have this one's GPU, and tasks beside each other would share it.
    realigned_on = str(device) if job.cluster.has_one_slot else "cpu"
    settings = AlignmentSettings(
        recipe.evaluation.acoustic_scale, recipe.models.of(ALIGNER), realigned_on, versions
    )
    with process_group.open_world(device=device), distribute_on_spark(job) as distribute:
        realigned = partial(
            realign,
            job.store,
            job.run_uri,
            job.corpus_uri,
            settings=settings,
            loss_budget=recipe.loss_budget,
            distribute=distribute,
        )
        for each in realignment_rounds(recipe.alignment.rounds):
            with training_ranks(job) as ranks:
                fit_model(
                    aligner_fit(recipe, each), job.store, job.run_uri, ranks.group, ranks.device
                )
            aligned = [realigned(each)]
        # Newbob's loss is of development speakers where the corpus has some.
        if has_dev:
            aligned.append(realigned(each, subset=DEV))
    return aligned


def unreached_senones(bootstrapped: Manifest) -> str:
    """Say which bound kept the tree below `max_senones`; nothing if it has so many."""
    config = bootstrapped.config["senones"]
    bound = bootstrapped.statistic("senone_bound", str)
    if bound == "max_senones":
        return ""
    num_senones = bootstrapped.statistic("num_senones", int)
    reached = f"{num_senones} senones of max_senones = {config['max_senones']}"
    if bound == "contexts":
        return f"{reached}: the transcripts have no more triphones to tell apart"
    return (
        f"{reached}: any further split leaves a side below senones.min_count = "
        f"{config['min_count']} frames; lower it for more"
    )


STEP = Step(
    name=ALIGN,
    description="Align every labelled frame to a senone. A monophone model makes the first "
    "alignment, a phonetic decision tree ties its states to senones, and a network trained on "
    "these realigns the data, in as many rounds as the recipe says (paper 003 VII-C2). The "
    "bootstrap and the network take this process; realignment is a Spark task for each shard, on "
    "--device where the cluster's master is local[1], on the CPU elsewhere.",
    run=run,
)

if __name__ == "__main__":
    main(STEP, arguments_with_device(STEP))
