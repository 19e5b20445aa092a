"""Measure word error rate against real-time factor at several beams, on a run's own speakers.

python -m tests.benchmarks.beams --recipe recorded --run URI [--subset dev] [--model baseline]

Every utterance is searched at all beams in turn, so that a busy machine slows all alike, and its
logits are computed once. Seconds are this process's own. A search is `beam/max_active`, and the
first one is what the others are compared with, by draws of speakers.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from infra.store.object_store import ObjectStore, join_uri, normalize_uri
from jobs.cli.job import recipe_path
from pipeline.records import WITHOUT_PLACEMENT
from pipeline.runs.names import ALIGNMENT_STEP, BASELINE, CORPUS_FOLDER, DEV, features_step
from tests.benchmarks.measure import Figure
from training.align.labelled import read_lexicon, read_shards
from training.align.network_alignment import read_tree
from training.decode.decoder import DecoderConfig, decode
from training.decode.graph import DecodingGraph, decoding_graph
from training.evaluate.language_model import LanguageModelFiles
from training.evaluate.significance import SpeakerCounts, resample
from training.evaluate.slices import scored_pieces
from training.evaluate.word_errors import UtteranceErrors, WordErrors, word_errors
from training.models.store import TrainedModel, load_model
from training.settings.recipe import Recipe, read_recipe

SEARCHES = (
    *("15/7000", "13/7000", "13/5000", "13/1500", "11/5000", "11/1500", "11/700"),
    *("10/1500", "9/1500", "8/1500", "7/700", "6/700"),
)
NUM_PARTS = 5
"""Real-time factors are of so many parts of the speech, whose spread is shown."""


@dataclass
class Spent:
    """Spent: seconds of work and of speech, by part."""

    work_s: list[float] = field(default_factory=lambda: [0.0] * NUM_PARTS)
    speech_s: list[float] = field(default_factory=lambda: [0.0] * NUM_PARTS)

    def add(self, part: int, work_s: float, speech_s: float) -> None:
        self.work_s[part] += work_s
        self.speech_s[part] += speech_s

    def factors(self) -> list[float]:
        """Return the work in seconds of speech, of each part that has any."""
        pairs = zip(self.work_s, self.speech_s, strict=True)
        return [work / speech for work, speech in pairs if speech]


@dataclass(frozen=True)
class Speakers:
    """Speakers of a run, with what decodes them."""

    store: ObjectStore
    run_uri: str
    recipe: Recipe
    model: TrainedModel
    graph: DecodingGraph
    acoustic_scale: float

    @classmethod
    def of_run(cls, recipe: Recipe, run_uri: str, name: str, scale: float) -> "Speakers":
        """Read a model, and build its graph as evaluation does."""
        corpus_uri = normalize_uri(recipe.corpus.uri or join_uri(run_uri, CORPUS_FOLDER))
        store = ObjectStore((run_uri, corpus_uri))
        lexicon = read_lexicon(store, run_uri, corpus_uri, [ALIGNMENT_STEP]).parse()
        files = LanguageModelFiles.read(store, corpus_uri, recipe.evaluation)
        language_model = files.model(store, run_uri, lexicon, recipe.evaluation)
        arpa = language_model.arpa(recipe.evaluation.ngram_order)
        graph = decoding_graph(lexicon, read_tree(store, run_uri), arpa)
        model = load_model(store, run_uri, name, recipe.models.of(name))
        return cls(store, run_uri, recipe, model, graph, scale)

    def decode(
        self, subset: str, searches: Sequence[str], share: int
    ) -> tuple[list[UtteranceErrors], dict[str, Spent]]:
        """Decode one utterance in `share` at each search; return errors and seconds of each."""
        configs = {name: DecoderConfig(*_numbers(name)) for name in searches}
        spent = {name: Spent() for name in ("network", *searches)}
        found = []
        shards = read_shards(self.store, self.run_uri, features_step(subset)).values()
        rows = [row for shard in shards for row in shard][::share]
        for number, row in enumerate(rows):
            part, speech_s = number % NUM_PARTS, row.duration_ms / 1000
            began = time.process_time()
            pieces = list(scored_pieces([row], self.model))
            spent["network"].add(part, time.process_time() - began, speech_s)
            reference, errors = (row.text or "").split(), dict[str, WordErrors]()
            for name, config in configs.items():
                began = time.process_time()
                words = [
                    word
                    for piece in pieces
                    for word in decode(
                        self.graph, self.acoustic_scale * piece.log_likelihoods, config
                    )
                ]
                spent[name].add(part, time.process_time() - began, speech_s)
                errors[name] = word_errors(reference, words)
            placement = row.placement or WITHOUT_PLACEMENT
            found.append(
                UtteranceErrors(
                    row.utterance_id, row.speaker_id, placement, row.duration_ms, errors
                )
            )
        return found, spent


def _numbers(search: str) -> tuple[float, int]:
    beam, _, max_active = search.partition("/")
    return float(beam), int(max_active)


def curve(found: Sequence[UtteranceErrors], spent: dict[str, Spent]) -> Iterator[dict[str, object]]:
    """Yield each search's word error rate, its change by speakers, and its real-time factor."""
    counts = SpeakerCounts.of(found)
    drawn = resample(counts)
    first = next(iter(counts.errors))
    of_first = spent[first].factors()
    for name, errors in counts.errors.items():
        factors = spent[name].factors()
        speed = [there / here for there, here in zip(of_first, factors, strict=True)]
        yield {
            "search": name,
            "wer": drawn.word_error_rate(name).value,
            "errors": int(errors.sum()),
            "reduction": drawn.reduction(first, name).to_json(),
            "real_time_factor": Figure.of("", factors, "").median,
            "speed": [Figure.of("", speed, "").median, min(speed), max(speed)],
        }


def main() -> None:
    """Print the curve as a table, or as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.beams",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", required=True, help="the recipe of the run, or its name")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--run", required=True, help="a run with features, alignment and model")
    parser.add_argument("--subset", default=DEV, help="whom to decode; choices are for dev alone")
    parser.add_argument("--model", default=BASELINE)
    parser.add_argument("--scale", type=float, help="acoustic scale; default: the recipe's")
    parser.add_argument("--share", type=int, default=1, help="take one utterance in so many")
    parser.add_argument("--searches", default=",".join(SEARCHES), help="beam/max_active, ...")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    recipe = read_recipe(recipe_path(arguments.recipe), arguments.set)
    run_uri = normalize_uri(arguments.run)
    scale = arguments.scale or recipe.evaluation.acoustic_scale
    speakers = Speakers.of_run(recipe, run_uri, arguments.model, scale)
    searches = arguments.searches.split(",")
    found, spent = speakers.decode(arguments.subset, searches, arguments.share)
    rows = list(curve(found, spent))
    if arguments.json:
        print(json.dumps({"scale": scale, "curve": rows}))
        return
    network = Figure.of("", spent["network"].factors(), "").median
    states = speakers.graph.fst.num_states
    print(f"{len(found)} utterances, graph of {states:,} states, scale {scale}")
    print(f"network: {network:.4f} x real time")
    print("| beam / max_active | WER, % | WERR to the first | real-time factor | speed |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        gained, (speed, low, high) = row["reduction"], row["speed"]
        print(
            f"| {row['search']} | {row['wer']:.2f} | {gained['value']:.2f} "
            f"({gained['low']:.2f}..{gained['high']:.2f}) | {row['real_time_factor']:.4f} | "
            f"{speed:.2f} ({low:.2f}..{high:.2f}) |"
        )


if __name__ == "__main__":
    main()
