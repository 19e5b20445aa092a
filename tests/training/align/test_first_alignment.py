"""The bootstrap of the labelled data: a bounded share of it, drawn evenly from the speakers."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from infra.store.object_store import join_uri
from jobs.bootstrap import text_words
from pipeline.audit.verify import verify_run
from pipeline.filterbank import NUM_BINS
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.engine import LossBudgetExceededError
from pipeline.runs.ledger import QUARANTINED, read_lines
from pipeline.runs.manifest import Manifest, read_manifest, read_output, sha256
from pipeline.runs.names import BOOTSTRAP_STEP
from pipeline.shards import FeatureRow, read_partition
from tests.small_corpus import serially
from tests.training.align.labelled_run import (
    FEATURES,
    SMALL_TREE,
    bootstrapped,
    row,
    shards,
    write_labelled,
)
from training.align import bootstrap as bootstrap_module
from training.align import shard_alignment
from training.align.bootstrap import MS_PER_HOUR, bootstrap, draw_places, draw_rows
from training.align.labelled import read_lexicon, read_tree
from training.align.realignment import read_lda_mllt
from training.decode.corpus_lexicon import CorpusLexicon
from training.settings.decoding import BootstrapConfig, SpelledText

LOUD, QUIET = 30, 3


def corpus() -> list[list[FeatureRow]]:
    """Two speakers have thirty utterances of a second each, and ten others three."""
    frames = np.zeros((100, NUM_BINS), np.float16)
    sizes = {"loud-0": LOUD, "loud-1": LOUD} | {f"quiet-{n}": QUIET for n in range(10)}
    rows = [
        row(f"{speaker}-{number}", speaker, frames)
        for speaker, size in sizes.items()
        for number in range(size)
    ]
    speakers = [("loud-0", "quiet-0", "quiet-1"), ("loud-1", *(f"quiet-{n}" for n in range(2, 10)))]
    return [[each for each in rows if each.speaker_id in some] for some in speakers]


def drawn(seconds: float, shards: list[list[FeatureRow]]) -> list[FeatureRow]:
    return draw_rows(shards, seconds / 3600)


@pytest.mark.parametrize(("seconds", "most"), [(12, 1), (24, 2), (36, 3), (50, 10)])
def test_every_speaker_gives_one_before_any_gives_two(seconds: int, most: int) -> None:
    """12 s of 12 speakers are one utterance of each; what is scarce is used up before the rest."""
    counts = Counter(each.speaker_id for each in drawn(seconds, corpus()))
    assert sum(counts.values()) == seconds
    for speaker, count in counts.items():
        assert count == (most if speaker.startswith("loud") else min(most, QUIET))


def test_the_draw_depends_on_no_order() -> None:
    """Shards and their rows in any order give the same utterances, and more hours give more."""
    parts = corpus()
    chosen = {each.utterance_id for each in drawn(20.5, parts)}
    backwards = [rows[::-1] for rows in parts[::-1]]
    assert {each.utterance_id for each in drawn(20.5, backwards)} == chosen
    assert len(chosen) == 20
    assert chosen < {each.utterance_id for each in drawn(21, parts)}


def test_an_utterance_that_does_not_fit_ends_the_draw() -> None:
    """No later, shorter one slips in, whether it is read before or after."""
    rows, _ = corpus()
    (long, *rest) = sorted(rows, key=lambda each: draw_places(rows)[rows.index(each)])
    long = replace(long, duration_ms=50_000)
    for order in ([long, *rest], [*rest, long]):
        assert drawn(20, [order]) == []


def test_nothing_but_the_drawn_rows_remains_in_memory() -> None:
    """A drawn row does not keep its shard's bytes; rows keep their order."""
    block = np.zeros((5000, NUM_BINS), np.float16)
    rows = [row(f"u{n}", f"s{n % 4}", block[100 * n : 100 * n + 100]) for n in range(50)]
    some = drawn(7, [rows])
    assert len(some) == 7
    assert all(each.features.base is None for each in some)
    assert len(draw_rows([rows], 0.0)) == 50
    assert [each.utterance_id for each in drawn(50, [rows])] == [each.utterance_id for each in rows]


def read_aligned(place, manifest: Manifest) -> dict[str, np.ndarray]:
    store, run_uri, _ = place
    return {
        each.utterance_id: each.targets.senones
        for output in manifest.outputs
        for each in read_partition(read_output(store, run_uri, output))
    }


def test_a_share_trains_the_monophones_and_all_are_aligned(tmp_path: Path) -> None:
    """The tree is of all labelled frames, each of which has a senone; verify finds none lost."""
    place = write_labelled(tmp_path, shards())
    store, run_uri, corpus_uri = place
    manifest = bootstrapped(place, max_hours=8_000 / MS_PER_HOUR).manifest
    labelled = read_manifest(store, run_uri, FEATURES).tally_out
    assert manifest.tally_in == manifest.tally_out == labelled
    assert manifest.config["bootstrap"]["max_hours"] == 8_000 / MS_PER_HOUR
    context = step_context(store, run_uri, BOOTSTRAP_STEP, manifest.config, manifest.inputs).scratch
    drawn = context.committed("monophones")
    assert drawn is not None
    assert 6_000 < drawn.tally_in.duration_ms <= 8_000
    aligned = read_aligned(place, manifest)
    assert len(aligned) == labelled.utterances
    assert sum(manifest.statistics["senone_counts"]) == sum(map(len, aligned.values()))
    found = verify_run(store, run_uri, corpus_uri, lambda *_: None)
    assert [each for each in found.findings if each.object.startswith("alignments")] == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Return the manifest of a bootstrap with the default bound."""
    return bootstrapped(write_labelled(tmp_path_factory.mktemp("whole"), shards())).manifest


def test_all_are_drawn_where_the_hours_suffice(whole: Manifest, tmp_path: Path) -> None:
    """Twenty hours are more than this run has: the bytes are those without a bound."""
    unbounded = bootstrapped(write_labelled(tmp_path, shards()), max_hours=0.0).manifest
    assert whole.unselected == unbounded.unselected == Tally()
    assert [each.sha256 for each in whole.outputs] == [each.sha256 for each in unbounded.outputs]


def test_a_bound_shorter_than_an_utterance_is_refused(tmp_path: Path) -> None:
    """The error names the setting and its value."""
    parts = [[replace(each, duration_ms=4000) for each in part] for part in shards()]
    place = write_labelled(tmp_path, parts)
    with pytest.raises(ValueError, match=r"bootstrap\.max_hours = 0\.001: need more"):
        bootstrapped(place, max_hours=0.001)
    with pytest.raises(ValueError, match="features/labelled has no utterance: need transcribed"):
        bootstrapped(write_labelled(tmp_path / "none", []), max_hours=0.0)


def with_a_wasp(parts: list[list[FeatureRow]], chosen: str) -> list[list[FeatureRow]]:
    """Put a word that the lexicon lacks into one transcript."""
    return [
        [replace(each, text="see a wasp") if each.utterance_id == chosen else each for each in part]
        for part in parts
    ]


def test_words_outside_the_draw_count_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Monophones align what was not drawn, so the loss budget is compared with all words."""
    parts = shards()
    hours = 8_000 / MS_PER_HOUR
    chosen = {each.utterance_id for each in draw_rows(parts, hours)}
    left = next(each for part in parts for each in part if each.utterance_id not in chosen)
    place = write_labelled(tmp_path, with_a_wasp(parts, left.utterance_id))
    fail = "training.align.bootstrap.train_monophones", lambda *_: pytest.fail("trained")
    monkeypatch.setattr(*fail)
    said = "lexicon.txt lacks 1 word, in 1 of 24 labelled utterances: 'wasp'; the loss budget is"
    with pytest.raises(LossBudgetExceededError, match=said):
        bootstrapped(place, max_hours=hours)


def test_an_utterance_with_an_unknown_word_is_a_ledger_row(tmp_path: Path) -> None:
    """The row names the word; what remains is aligned as if the utterance were not there."""
    parts = shards()
    place = write_labelled(tmp_path / "row", with_a_wasp(parts, "utterance-09"))
    manifest = bootstrapped(place, 0.05).manifest
    assert manifest.tally_in == manifest.tally_out + manifest.quarantined
    ((row,),) = (
        read_lines(read_output(*place[:2], each), QUARANTINED) for each in manifest.ledgers
    )
    assert (row["utterance_id"], row["reason"]) == ("utterance-09", "unknown_word")
    assert row["detail"] == "not in lexicon.txt: 'wasp'"
    without = [[each for each in part if each.utterance_id != "utterance-09"] for part in parts]
    other = write_labelled(tmp_path / "without", without)
    aligned, expected = (
        read_aligned(place, manifest),
        read_aligned(other, bootstrapped(other).manifest),
    )
    assert aligned.keys() == expected.keys()
    assert all(np.array_equal(aligned[name], expected[name]) for name in expected)


def test_unknown_words_may_be_aligned_as_spoken_noise(tmp_path: Path) -> None:
    """They are SPN, a phone of the tree, and later steps read so from the bootstrap's manifest."""
    place = write_labelled(tmp_path, with_a_wasp(shards(), "utterance-09"))
    manifest = bootstrapped(place, unknown_words="spn").manifest
    assert (manifest.tally_in, manifest.quarantined) == (manifest.tally_out, Tally())
    lexicon = read_lexicon(*place, []).parse()
    tree = read_tree(*place[:2], BOOTSTRAP_STEP)
    assert tree.phones == lexicon.phones
    noise = set(tree.table[:, lexicon.phone_ids["SPN"]].flat)
    aligned = read_aligned(place, manifest)
    assert noise & set(aligned["utterance-09"])
    assert not noise & set(aligned["utterance-08"])


def test_letters_pronounce_unknown_words(tmp_path: Path) -> None:
    """No utterance is lost; later steps read the phones that the bootstrap's manifest states."""
    parts = with_a_wasp(shards(), "utterance-09")
    bees = [
        [replace(row, text=(row.text or "").replace("wasp", "bees")) for row in each]
        for each in parts
    ]
    place = write_labelled(tmp_path, bees)
    manifest = bootstrapped(place, unknown_words="letters").manifest
    assert (manifest.tally_in, manifest.quarantined) == (manifest.tally_out, Tally())
    made = manifest.statistics["made_pronunciations"]
    lexicon = read_lexicon(*place, []).parse()
    assert {word: lexicon.pronunciations[word] for word in made} == {"bees": ((*made["bees"],),)}
    assert read_tree(*place[:2], BOOTSTRAP_STEP).phones == lexicon.phones
    assert "utterance-09" in read_aligned(place, manifest)


def test_letters_pronounce_words_of_a_text_too(tmp_path: Path) -> None:
    """The most frequent two that the lexicon lacks; the manifest has the text's digest."""
    place = write_labelled(tmp_path, shards())
    data = b"sees backs sees\nbees backs sees\n"
    place[0].put(join_uri(place[2], "lm.txt"), data)
    lexicon = CorpusLexicon.read(place[0], place[2], "letters").parse()
    assert "bees" not in lexicon.pronunciations
    text = text_words(place[0], place[2], SpelledText("lm.txt", 2), lexicon)
    settings = BootstrapConfig(num_iterations=2, max_gaussians=1)
    manifest = bootstrap(
        *place, settings, SMALL_TREE, 0.0, serially, unknown_words="letters", text=text
    ).manifest
    assert manifest.inputs["language_model_text"] == sha256(data)
    assert (manifest.config["language_model_text"], manifest.config["num_text_words"]) == (
        "lm.txt",
        2,
    )
    assert manifest.statistics["made_pronunciations"].keys() == {"sees", "backs"}
    assert {"sees", "backs"} <= read_lexicon(*place, []).parse().pronunciations.keys()


def test_words_of_other_letters_remain_unknown(tmp_path: Path) -> None:
    """No word of the lexicon has a w, so nothing is made up, and the utterance is a row."""
    place = write_labelled(tmp_path, with_a_wasp(shards(), "utterance-09"))
    manifest = bootstrapped(place, 0.5, unknown_words="letters").manifest
    assert manifest.quarantined.utterances == 1
    assert "made_pronunciations" not in manifest.statistics


def test_the_loss_budget_is_of_all_labelled_utterances(tmp_path: Path) -> None:
    """Eight of 24 are too short to align, though a draw of some seconds has two of them."""
    first, *rest = shards()
    short = [replace(each, features=each.features[:9]) for each in first]
    place = write_labelled(tmp_path, [short, *rest])
    with pytest.raises(LossBudgetExceededError, match=r"8 of 24"):
        bootstrapped(place, 0.3, max_hours=8_000 / MS_PER_HOUR)


class KilledError(Exception):
    """KilledError ends a driver whose cluster is lost."""


@pytest.mark.parametrize("features", ["cepstra", "lda_mllt"])
def test_a_bootstrap_that_is_killed_again_and_again_changes_no_byte(
    features: Literal["cepstra", "lda_mllt"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt does one task more; monophones are trained and the tree is grown once."""
    tree = replace(SMALL_TREE, features=features)
    alone = bootstrapped(write_labelled(tmp_path / "alone", shards()), tree=tree).manifest
    store, run_uri, corpus_uri = write_labelled(tmp_path / "killed", shards())
    calls: Counter[str] = Counter()

    def one_then_killed(tasks: Sequence[Any], function: Any, description: str) -> list[Any]:
        if not tasks:
            return []
        calls.update([description])
        getattr(function, "run_task", function)(tasks[0])
        raise KilledError(description)

    for name in ("train_monophones", "grow_tree"):
        module = bootstrap_module if name == "train_monophones" else shard_alignment
        own = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, own=own, name=name: calls.update([name]) or own(*given)
        )
    manifest = None
    while manifest is None:
        with suppress(KilledError):
            config = BootstrapConfig(num_iterations=2, max_gaussians=1)
            place = store, run_uri, corpus_uri
            manifest = bootstrap(*place, config, tree, 0.0, one_then_killed).manifest
    assert manifest.to_bytes() == alone.to_bytes()
    assert dict(calls) == {
        "train_monophones": 1,
        "grow_tree": 1,
        "align phones": 3,
        "alignments/bootstrap": 3,
    }
    matrix = manifest.statistics.get("lda_mllt")
    assert (matrix is None) == (features == "cepstra")
    found = read_lda_mllt(store, run_uri)
    assert np.array_equal(found, matrix) if matrix else found is None


def test_the_tree_is_grown_on_all_labelled_frames(tmp_path: Path) -> None:
    """Another shard outside the draw changes the tree, and not the monophones."""
    parts = shards()
    hours = 8_000 / MS_PER_HOUR
    chosen = {each.utterance_id for each in draw_rows(parts, hours)}
    changed = [
        [
            each if each.utterance_id in chosen else replace(each, features=each.features[::-1] * 2)
            for each in part
        ]
        for part in parts
    ]
    trees, monophones = [], []
    for name, some in (("first", parts), ("second", changed)):
        place = write_labelled(tmp_path / name, some)
        manifest = bootstrapped(place, max_hours=hours).manifest
        trees.append(manifest.statistics["senone_tree"])
        config, inputs = manifest.config, manifest.inputs
        scratch = step_context(*place[:2], BOOTSTRAP_STEP, config, inputs).scratch
        trained = scratch.committed("monophones")
        assert trained is not None
        monophones.append(trained.outputs[0].sha256)
    assert trees[0] != trees[1]
    assert monophones[0] == monophones[1]
