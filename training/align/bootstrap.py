"""Bootstrap the alignment: monophones on a share of the labelled hours, the tree on all of them."""

import heapq
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Float32

from infra.log_lines import log
from infra.prefetch import prefetch
from infra.store.object_store import ObjectStore, scan_checked
from pipeline.placement_versions import distinct, heard_versions
from pipeline.records import Tally
from pipeline.runs.commit import Commit, Repetition, StepContext
from pipeline.runs.engine import Distribute, StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, Output, is_finished, read_manifest, read_output
from pipeline.runs.names import BOOTSTRAP_STEP, DEV, LABELLED, features_step
from pipeline.sampling import sampling_priority
from pipeline.settings import Versions
from pipeline.shards import FeatureRow, read_feature_texts, read_features
from training.align.labelled import MADE_STATISTIC, unknown_words_of
from training.align.lda_mllt import LDA_MLLT_STATISTIC, estimate_lda_mllt
from training.align.monophone_hmm import Monophones, speaker_cepstra, train_monophones
from training.align.shard_alignment import PhoneAligner, Phones, align_and_grow
from training.array_encoding import decode_arrays, encode_arrays
from training.decode.corpus_lexicon import CorpusLexicon, UnknownWords
from training.decode.lexicon import Lexicon
from training.settings.decoding import (
    BootstrapConfig,
    SpelledText,
    TreeConfig,
    UnknownWordsRule,
    bootstrap_settings,
)

READ_AHEAD = 2
"""Shards in memory while one is drawn from, of some 0.25 GB at five hours."""

MS_PER_HOUR = 3_600_000
_SEED = 17


@dataclass(frozen=True, slots=True)
class TextWords:
    """TextWords: words of a text that their letters pronounce too, and the text's digest."""

    settings: SpelledText
    words: Sequence[str]
    digests: Mapping[str, str]


NO_WORDS_OF_TEXT = TextWords(SpelledText(), (), {})


def bootstrap(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    config: BootstrapConfig,
    tree_config: TreeConfig,
    loss_budget: float,
    distribute: Distribute,
    versions: Versions = "own",
    unknown_words: UnknownWordsRule = "row",
    text: TextWords = NO_WORDS_OF_TEXT,
) -> StepResult:
    """Train monophones, align all by them, grow a senone tree, and write the senone of every frame.

    The monophones learn from at most `max_hours`, in this process. With `versions` "clearest", the
    versions of an utterance have the alignment of the clearest one. With `unknown_words` "row",
    utterances with a word without pronunciation have no alignment; with "letters" the manifest
    states the pronunciations that are made, for all other steps: of the transcripts' words, and of
    those of a `text` for a language model. LossBudgetExceededError if too many of all labelled
    utterances have no alignment for a word.
    """
    features = features_step(LABELLED)
    read_manifest(store, run_uri, features)  # what is missing first is named first
    subsets = [LABELLED]
    if unknown_words == "letters" and is_finished(store, run_uri, features_step(DEV)):
        subsets.append(DEV)
    stored = CorpusLexicon.read(store, corpus_uri, unknown_words)

    def align_monophones(step: StepRun) -> Manifest:
        context = step.context
        spoken = transcribed_words(store, run_uri, subsets)
        complete = stored.pronounced(spoken.union(text.words))
        lexicon = complete.parse()
        for subset in subsets:
            check_transcripts(
                store, run_uri, subset, lexicon, loss_budget, unknown_words, is_pronounced=True
            )
        trained = _trained(context, complete, config, tree_config, versions)
        monophones = StoredMonophones(trained, unknown_words)
        about: dict[str, Any] = {}
        if (lda_mllt := monophones.load(context).lda_mllt) is not None:
            about[LDA_MLLT_STATISTIC] = lda_mllt.tolist()
        if complete.made:
            about[MADE_STATISTIC] = {word: [*phones] for word, phones in complete.made.items()}
        return align_and_grow(
            step,
            monophones.load,
            versions,
            lexicon.phones,
            tree_config,
            loss_budget,
            distribute,
            about,
        )

    resolved = bootstrap_settings(config, tree_config, versions, unknown_words, text.settings)
    spec = StepSpec(
        store,
        run_uri,
        BOOTSTRAP_STEP,
        resolved,
        [features_step(subset) for subset in subsets],
        {**stored.digests, **text.digests},
        # A frame between two states may fall to the other one where likelihoods have other last
        # bits.
        Repetition.OTHER_LAST_BITS,
    )
    return run_step(spec, align_monophones)


@dataclass(frozen=True, slots=True)
class StoredMonophones:
    """StoredMonophones names what `_trained` stored, for the tasks of the step."""

    state: Output
    unknown_words: UnknownWordsRule

    def load(self, context: StepContext) -> PhoneAligner:
        """Read the monophones, and the lexicon with the pronunciations that it lacked."""
        state = decode_arrays(context.read(self.state))
        lexicon = CorpusLexicon(state["lexicon"].encode(), self.unknown_words, state["made"])
        monophones = Monophones.from_state(state["monophones"])
        return MonophoneAligner(lexicon.parse(), state[LDA_MLLT_STATISTIC], monophones)


@dataclass(frozen=True, slots=True)
class MonophoneAligner(PhoneAligner):
    """MonophoneAligner aligns utterances by monophones."""

    monophones: Monophones

    def align(
        self, rows: Sequence[FeatureRow], cepstra: Mapping[str, Float32[np.ndarray, "_frames 39"]]
    ) -> Phones:
        """Align utterances one after the other."""
        return {
            row.utterance_id: self.monophones.align(row, cepstra[row.utterance_id], self.lexicon)
            for row in rows
        }


def check_transcripts(
    store: ObjectStore,
    run_uri: str,
    subset: str,
    lexicon: Lexicon,
    loss_budget: float,
    rule: UnknownWordsRule,
    *,
    is_pronounced: bool = False,
) -> None:
    """Log which words of a subset's transcripts the lexicon lacks; reads no features.

    LossBudgetExceededError if too many utterances cannot be aligned for them; by the rule
    "letters" none is refused before the lexicon has the pronunciations that are made.
    """
    unknown = UnknownWords.of(_texts(store, run_uri, subset), lexicon)
    left = [other for other in ("letters", "spn") if other != rule]
    if is_pronounced:
        rule = "row"
    unknown.check_loss(lexicon, subset, loss_budget, rule, left)
    if said := unknown.note(lexicon, subset, rule):
        log(said)


def transcribed_words(store: ObjectStore, run_uri: str, subsets: Iterable[str]) -> set[str]:
    """Return the words of all transcripts of some subsets; reads no features."""
    texts = chain.from_iterable(_texts(store, run_uri, subset) for subset in subsets)
    return {word for text in texts for word in text.split()}


def _texts(store: ObjectStore, run_uri: str, subset: str) -> Iterator[str]:
    for output in read_manifest(store, run_uri, features_step(subset)).outputs:
        yield from scan_checked(store, output.uri(run_uri), read_feature_texts)


def _trained(
    context: StepContext,
    complete: CorpusLexicon,
    config: BootstrapConfig,
    tree_config: TreeConfig,
    versions: Versions,
) -> Output:
    """Train monophones on the hours that are drawn; a killed step finds them again.

    The lexicon, which is `complete`, is stored with them, and the transform of the tree's features.
    """
    scratch, name = context.scratch, "monophones"
    if (earlier := scratch.committed(name)) is not None:
        return earlier.outputs[0]
    lexicon = complete.parse()
    rows = [row for row in _draw(context, config.max_hours) if not unknown_words_of(row, lexicon)]
    utterances = distinct(heard_versions(rows, versions))
    cepstra = speaker_cepstra(utterances)
    # 003 VII-C2 starts from an alignment model at hand; monophones need none.
    trained = train_monophones(utterances, cepstra, lexicon, config)
    matrix = None
    if tree_config.features == "lda_mllt":
        frames = ((cepstra[name], path) for name, path in trained.paths.items())
        num_states = len(trained.monophones.mixtures)
        matrix = estimate_lda_mllt(frames, num_states)
    state = {
        "lexicon": complete.data.decode(),
        "made": dict(complete.made),
        "monophones": trained.monophones.to_state(),
        LDA_MLLT_STATISTIC: matrix,
    }
    tally = Tally.of(rows)
    record = Commit(
        task=name,
        fingerprint=context.fingerprint,
        outputs=(scratch.put_output(name, ".npz", encode_arrays(state), tally),),
        tally_in=tally,
    )
    return scratch.commit(record).outputs[0]


def _draw(context: StepContext, max_hours: float) -> list[FeatureRow]:
    def read(output: Output) -> list[FeatureRow]:
        return read_features(read_output(context.store, context.run_uri, output))

    labelled = read_manifest(context.store, context.run_uri, features_step(LABELLED))
    if not labelled.tally_out.utterances:
        need = "need transcribed speakers who are neither held out nor for development"
        raise ValueError(f"{labelled.step} has no utterance: {need}")
    shards = (rows for _, rows in prefetch(read, labelled.outputs, READ_AHEAD))
    rows = draw_rows(shards, max_hours)
    if not rows:
        raise ValueError(
            f"bootstrap.max_hours = {max_hours:g}: need more: the utterance that comes "
            "first in the draw is longer"
        )
    return rows


def draw_rows(shards: Iterable[Sequence[FeatureRow]], max_hours: float) -> list[FeatureRow]:
    """Draw at most `max_hours` (0: all) evenly from the speakers; only these remain in memory.

    Utterances are taken in the order of their places, whatever the order of the shards, until the
    next one would exceed the hours. They keep the order of the shards and of their rows.
    """
    limit_ms = max_hours * MS_PER_HOUR or math.inf
    drawn: list[_Drawn] = []
    total_ms, end = 0, (-sys.maxsize, 0)
    for shard, rows in enumerate(shards):
        for number, (row, (rank, priority)) in enumerate(zip(rows, draw_places(rows), strict=True)):
            if (-rank, -priority) <= end:
                continue
            # Features are views of their shard, which one drawn row would keep in memory.
            own = replace(row, features=row.features.copy())
            heapq.heappush(drawn, _Drawn((-rank, -priority), (shard, number), own))
            total_ms += row.duration_ms
            # The last of the draw goes first, and with it all that would come after it.
            while total_ms > limit_ms:
                last = heapq.heappop(drawn)
                total_ms -= last.row.duration_ms
                end = last.key
    return [each.row for each in sorted(drawn, key=lambda each: each.position)]


@dataclass(order=True, frozen=True, slots=True)
class _Drawn:
    """_Drawn is a row that has been drawn; a heap has the one of the last place on top."""

    key: tuple[int, int]
    position: tuple[int, int] = field(compare=False)
    row: FeatureRow = field(compare=False)


def draw_places(rows: Sequence[FeatureRow]) -> list[tuple[int, int]]:
    """Return each utterance's place in the draw: its rank among its speaker's, and its hash.

    A speaker lies whole in one shard, so every speaker gives one utterance before any gives two.
    """
    hashes = [sampling_priority(_SEED, row.utterance_id) for row in rows]
    ranks, num_seen = [0] * len(rows), Counter[str]()
    for index in sorted(range(len(rows)), key=hashes.__getitem__):
        ranks[index] = num_seen[rows[index].speaker_id]
        num_seen[rows[index].speaker_id] += 1
    return list(zip(ranks, hashes, strict=True))
