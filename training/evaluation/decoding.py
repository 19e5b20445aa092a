"""Decode utterances with one model at several settings, and count word errors by placement."""

from collections import defaultdict
from collections.abc import Sequence

from tqdm import tqdm

from pipeline.shards import FeatureRow
from training.decoding.decoder import DecoderConfig, decode
from training.decoding.decoding_settings import DecodingSettings
from training.decoding.graph.grammar import GrammarWeights
from training.decoding.graph.hclg import DecodingGraph, decoding_graph
from training.decoding.lexicon import Lexicon
from training.decoding.senones.senone_tree import SenoneTree
from training.evaluation.language_model import EstimatedModel, GivenModel
from training.evaluation.utterance_errors import WITHOUT_PLACEMENT
from training.evaluation.word_errors import WordErrors, word_errors
from training.models.store import TrainedModel
from training.targets.alignment import log_likelihoods


class Graphs:
    """Graphs builds the decoding graph of some settings; it keeps those of the last ones."""

    def __init__(
        self, lexicon: Lexicon, tree: SenoneTree, language_model: EstimatedModel | GivenModel
    ) -> None:
        self._parts = lexicon, tree
        self._language_model = language_model
        self._kept: dict[tuple[int, GrammarWeights], DecodingGraph] = {}

    def of(self, settings: Sequence[DecodingSettings]) -> list[DecodingGraph]:
        """Return the graph of each settings."""
        keys = [
            (each.ngram_order, GrammarWeights(each.language_model_scale, each.insertion_penalty))
            for each in settings
        ]
        self._kept = {key: self._kept.get(key) or self._build(*key) for key in keys}
        return [self._kept[key] for key in keys]

    def _build(self, ngram_order: int, weights: GrammarWeights) -> DecodingGraph:
        return decoding_graph(*self._parts, self._language_model.arpa(ngram_order), weights)


def count_errors(
    rows: Sequence[FeatureRow],
    model: TrainedModel,
    settings: Sequence[DecodingSettings],
    graphs: Graphs,
    decoder: DecoderConfig,
    description: str,
) -> list[dict[str, WordErrors]]:
    """Decode the rows at each settings; return the word errors of each by placement.

    An utterance's logits are computed once for all settings.
    """
    found: list[dict[str, WordErrors]] = [defaultdict(WordErrors) for _ in settings]
    every = list(zip(settings, graphs.of(settings), found, strict=True))
    for row in tqdm(rows, desc=description, unit="utterance"):
        reference = (row.text or "").split()
        (scores,) = log_likelihoods([row], model, 1.0)
        for each, graph, errors in every:
            hypothesis = decode(graph, each.acoustic_scale * scores, decoder)
            # Errors are summed before dividing, so that long utterances weigh by their words.
            errors[placement_of(row)] += word_errors(reference, hypothesis)
    return [dict(sorted(errors.items())) for errors in found]


def placement_of(row: FeatureRow) -> str:
    """Return the device's placement, if the corpus has it."""
    return row.placement or WITHOUT_PLACEMENT
