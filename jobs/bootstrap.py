"""Make the first alignment, and the tree of senones (003 VII-C1).

megahour bootstrap --recipe demo --run runs/demo
"""

from infra.log_lines import log
from infra.store.object_store import ObjectStore
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job, require_moments
from jobs.cli.spark_steps import distribute_on_spark
from jobs.run_table import BOOTSTRAP
from pipeline.runs.manifest import Manifest, sha256
from pipeline.runs.names import DEV, DEV_ALIGNMENT_STEP, LABELLED, LEXICON_FILE, features_step
from pipeline.steps.selection.buckets import subsets_of
from pipeline.steps.selection.select import metadata_uri
from training.align.bootstrap import NO_WORDS_OF_TEXT, TextWords, bootstrap, check_transcripts
from training.decode.corpus_lexicon import CorpusLexicon
from training.decode.lexicon import Lexicon
from training.evaluate.language_model import LanguageModelFile
from training.settings.decoding import SpelledText
from training.settings.recipe import Recipe, check_phones, check_senones


def run(job: Job) -> StepResults:
    """Align by monophones and grow the tree; first refuse what a later step would refuse."""
    recipe = job.recipe
    features = features_step(LABELLED)
    is_there = job.has(features)
    if not is_there and LABELLED not in subsets_of(job.store, job.corpus_uri):
        raise ValueError(
            f"{metadata_uri(job.corpus_uri, LABELLED)} has no metadata: need transcribed "
            "speech to align; without any, a run ends with its features"
        )
    job.manifest(features)
    require_moments(job)
    rule = recipe.corpus.unknown_words
    lexicon = CorpusLexicon.read(job.store, job.corpus_uri, rule).parse()
    check_phones(recipe, len(lexicon.phones))
    if job.has_dev and not job.has(DEV_ALIGNMENT_STEP):
        check_transcripts(job.store, job.run_uri, DEV, lexicon, recipe.loss_budget, rule)
    with distribute_on_spark(job) as distribute:
        bootstrapped = bootstrap(
            *job.place,
            recipe.bootstrap,
            recipe.senones,
            recipe.loss_budget,
            distribute,
            recipe.alignment.versions,
            rule,
            text_words(job.store, job.corpus_uri, recipe.spelled_text, lexicon),
        )
    check_tree(recipe, bootstrapped.manifest)
    return [bootstrapped]


def text_words(
    store: ObjectStore, corpus_uri: str, settings: SpelledText, lexicon: Lexicon
) -> TextWords:
    """Choose the most frequent words of the language model's text that the lexicon lacks."""
    if not settings.num_text_words:
        return NO_WORDS_OF_TEXT
    name = settings.language_model_text
    file = LanguageModelFile.read(store, corpus_uri, name)
    words = [*file.spellable_words(lexicon.pronunciations, settings.num_text_words)]
    log(f"{name}: {len(words)} words that {LEXICON_FILE} lacks are pronounced too")
    return TextWords(settings, words, {"language_model_text": sha256(file.data)})


def check_tree(recipe: Recipe, grown: Manifest) -> None:
    """Log which bound kept a tree small; ConfigurationError if it is too small for the targets."""
    check_senones(recipe, grown.statistic("num_senones", int))
    if said := unreached_senones(grown):
        log(said)


def unreached_senones(grown: Manifest) -> str:
    """Say which bound kept the tree below `max_senones`; nothing if it has so many."""
    config = grown.config["senones"]
    bound = grown.statistic("senone_bound", str)
    if bound == "max_senones":
        return ""
    num_senones = grown.statistic("num_senones", int)
    reached = f"{num_senones} senones of max_senones = {config['max_senones']}"
    if bound == "contexts":
        return f"{reached}: the transcripts have no more triphones to tell apart"
    return (
        f"{reached}: any further split leaves a side below senones.min_count = "
        f"{config['min_count']} frames; lower it for more"
    )


STEP = Step(
    name=BOOTSTRAP,
    description="Make the first alignment of the labelled data: monophones align phones, and a "
    "phonetic decision tree, grown on all labelled hours, ties their states to senones (paper 003 "
    "VII-C1, C2). Monophones are trained in this process, on the hours that bootstrap.max_hours "
    "draws from all speakers; a Spark task for each shard then aligns it.",
    run=run,
)

if __name__ == "__main__":
    main(STEP)
