"""Decode with an ARPA or a text of the user's own: bounds, prefixes, unknown words, digests."""

import gzip
from codecs import BOM_UTF8
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest

from infra.store.object_store import ObjectStore, PrefixError
from pipeline.filterbank import NUM_BINS
from pipeline.records import Tally
from pipeline.runs.engine import StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, sha256
from pipeline.runs.names import ALIGNMENT_STEP
from pipeline.shards import Alignment, PartitionRow, write_partition
from tests.training.decode.whole_graphs import kneser_ney_arpa, witten_bell_arpa
from training.decode.entropy_pruning import pruned
from training.decode.lexicon import Lexicon, parse_lexicon
from training.decode.ngrams import arpa_text, witten_bell
from training.evaluate.graph_building import LanguageModelFiles
from training.evaluate.language_model import MAX_BYTES, MAX_TEXT_BYTES
from training.settings.decoding import EvaluationConfig

LEXICON = parse_lexicon("a AX\nb B\nc S\n")
PLAIN = EvaluationConfig(ngram_order=2, acoustic_scale=0.3, beam=13.0, max_active=5000)
SENTENCES = [["a", "b"], ["b", "c"]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with two aligned transcripts, and an empty corpus beside it."""
    (tmp_path / "corpus").mkdir()
    frames = np.zeros((9, NUM_BINS), np.float16)
    senones = Alignment(np.zeros(9, np.uint16))
    rows = [
        PartitionRow(f"u{n}", "s", 1, " ".join(words), frames, senones, 0)
        for n, words in enumerate(SENTENCES)
    ]

    def write(step: StepRun) -> Manifest:
        output = step.context.put_output("000000", ".parquet", write_partition(rows), Tally(2, 2))
        return step.lossless(Tally(2, 2), (output,))

    run_step(StepSpec(ObjectStore((str(tmp_path),)), str(tmp_path), ALIGNMENT_STEP, {}), write)
    return tmp_path


def files_of(run: Path, config: EvaluationConfig) -> LanguageModelFiles:
    store = ObjectStore((str(run),))
    return LanguageModelFiles.read(store, str(run / "corpus"), config)


def arpa_of(run: Path, config: EvaluationConfig, order: int = 2) -> str:
    files = files_of(run, config)
    model = files.model(ObjectStore((str(run),)), str(run), LEXICON, config)
    return arpa_text(model.of_order(order))


def test_transcripts_are_smoothed_as_the_recipe_says(run: Path) -> None:
    """Without files the model is of the labelled transcripts: Witten-Bell, or Kneser-Ney."""
    assert arpa_of(run, PLAIN) == witten_bell_arpa(SENTENCES, "abc", 2)
    kneser_ney = replace(PLAIN, smoothing="kneser_ney")
    assert arpa_of(run, kneser_ney, 3) == kneser_ney_arpa(SENTENCES, "abc", 3)


@pytest.mark.parametrize("smoothing", ["witten_bell", "kneser_ney"])
def test_text_joins_the_transcripts(run: Path, smoothing: str) -> None:
    """A text's sentences count beside the transcripts; unknown words are counted, not predicted."""
    (run / "corpus" / "language_model.txt").write_text("a c\n\nb wasp c\n")
    config = replace(PLAIN, smoothing=smoothing, language_model_text="language_model.txt")
    files = files_of(run, config)
    assert files.digests == {"language_model_text": sha256(b"a c\n\nb wasp c\n")}
    model = files.model(ObjectStore((str(run),)), str(run), LEXICON, config)
    assert model.statistics == {
        "num_text_sentences": 2,
        "num_text_words": 5,
        "num_unknown_words": 1,
    }
    text = arpa_text(model.of_order(2))
    listed = {tuple(line.split("\t")[1].split()) for line in text.splitlines() if "\t" in line}
    assert ("a", "c") in listed
    assert ("b", "c") in listed  # of the transcripts; "b wasp c" has no such pair
    assert ("wasp",) not in listed
    assert all(all(ngram) for ngram in listed)


def test_words_of_a_text_that_letters_may_pronounce_are_counted(run: Path) -> None:
    """The most frequent ones; the lexicon's own are not, and what has other letters neither."""
    (run / "corpus" / "language_model.txt").write_text("a ab , 10\nab b ba , <unk>\nba ab bb ,\n")
    config = replace(PLAIN, language_model_text="language_model.txt")
    (file,) = files_of(run, config).by_setting.values()
    assert file.spellable_words(["a", "b", "<unk>", "!k,"], 2) == {"ab": 3, "ba": 2}


def test_a_pruned_model_takes_histories_of_tokens(run: Path) -> None:
    """By Witten-Bell, whatever the smoothing; a given model has nothing but itself."""
    config = replace(PLAIN, smoothing="kneser_ney")
    model = files_of(run, config).model(ObjectStore((str(run),)), str(run), LEXICON, config)
    unpruned, histories = model.of_order(3), witten_bell(SENTENCES, "abc", 3)
    expected = arpa_text(pruned(unpruned, 0.05, histories))
    assert arpa_text(model.pruned(3, 0.05)) == expected != arpa_text(unpruned)
    (run / "mine.arpa").write_text(arpa_text(unpruned))
    config = replace(PLAIN, arpa=str(run / "mine.arpa"))
    given = files_of(run, config).model(ObjectStore((str(run),)), str(run), LEXICON, config)
    assert arpa_text(given.pruned(2, 0.05)) == arpa_text(pruned(given.of_order(2), 0.05))


def test_a_given_model_is_used_as_it_is(run: Path) -> None:
    """An ARPA by its URI replaces what transcripts would give, at any order."""
    given = witten_bell_arpa([["a", "b", "wasp"]], ["a", "b", "wasp"], 3)
    (run / "mine.arpa").write_text(given)
    config = replace(PLAIN, arpa=str(run / "mine.arpa"))
    model = files_of(run, config).model(ObjectStore((str(run),)), str(run), LEXICON, config)
    assert model.has_own_order
    assert model.of_order(1) is model.of_order(2)
    assert model.statistics["num_dropped_words"] == 1
    assert model.statistics["num_missing_words"] == 1  # c


def test_a_malformed_model_is_named(run: Path) -> None:
    """The error has the file, the line and what is needed there."""
    (run / "corpus" / "mine.arpa").write_text("\\data\\\nngram 1=x\n")
    with pytest.raises(ValueError, match=r"mine\.arpa: ARPA line 2: 'ngram 1=x': need `ngram 1=C"):
        arpa_of(run, replace(PLAIN, arpa="mine.arpa"))


def test_files_outside_the_prefixes_are_refused(run: Path, tmp_path: Path) -> None:
    """A model elsewhere is not read, whatever path leads to it."""
    store = ObjectStore((str(run / "corpus"),))
    (tmp_path / "mine.arpa").write_text("secret")
    for name in (str(tmp_path / "mine.arpa"), "../mine.arpa"):
        with pytest.raises(PrefixError, match="outside"):
            LanguageModelFiles.read(store, str(run / "corpus"), replace(PLAIN, arpa=name))


def test_large_files_are_refused_before_they_are_read(run: Path) -> None:
    """A file above the bound is refused by its size, with a remedy."""
    with (run / "corpus" / "huge.txt").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ValueError, match=f"{MAX_BYTES + 1} bytes: need at most {MAX_BYTES}: prune"):
        files_of(run, replace(PLAIN, language_model_text="huge.txt"))


def test_files_that_are_no_text_are_refused(run: Path) -> None:
    """A cut gzip, one that unpacks to too much, and another encoding are named, with a remedy."""
    (run / "corpus" / "packed.arpa").write_bytes(gzip.compress(b"a b\n" * 1000)[:-20])
    with pytest.raises(ValueError, match=r"packed\.arpa: no whole gzip file: "):
        arpa_of(run, replace(PLAIN, arpa="packed.arpa"))
    for begin, remedy in ((b"mmap lm http", "give the ARPA text"), (b"BZh9", "unpack it")):
        (run / "corpus" / "other.arpa").write_bytes(begin + bytes(99))
        with pytest.raises(ValueError, match=rf"other\.arpa: no text: {remedy}"):
            arpa_of(run, replace(PLAIN, arpa="other.arpa"))
    whole = gzip.compress(kneser_ney_arpa([["a", "b"]], ["a", "b"], 2).encode())
    (run / "corpus" / "packed.arpa").write_bytes(whole[:-8])  # all text, and no checksum
    with pytest.raises(ValueError, match=r"packed\.arpa: no whole gzip file: "):
        arpa_of(run, replace(PLAIN, arpa="packed.arpa"))
    (run / "corpus" / "bomb.txt").write_bytes(gzip.compress(bytes(MAX_TEXT_BYTES + 1), 1))
    with pytest.raises(ValueError, match=rf"more than {MAX_TEXT_BYTES} bytes, unpacked: prune"):
        arpa_of(run, replace(PLAIN, language_model_text="bomb.txt"))
    (run / "corpus" / "latin.txt").write_bytes("a b\nb \xfc\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: line 2 is not UTF-8: convert it"):
        arpa_of(run, replace(PLAIN, language_model_text="latin.txt"))


@pytest.mark.parametrize("setting", ["arpa", "language_model_text"])
def test_accents_are_part_of_their_letters(run: Path, setting: str) -> None:
    """As in a lexicon, whatever the file has; an editor's byte order mark is no word."""
    text = "caf\u00e9 b\nb\n"
    arpa = kneser_ney_arpa([["caf\u00e9", "b"]], ["caf\u00e9", "b"], 2)
    data = arpa if setting == "arpa" else text
    lexicon = Lexicon(dict.fromkeys(["caf\u00e9", "b"], (("AX",),)))
    (run / "corpus" / "plain").write_text(data)
    (run / "corpus" / "other").write_bytes(BOM_UTF8 + normalize("NFD", data).encode())
    found = []
    for name in ("plain", "other"):
        (file,) = files_of(run, replace(PLAIN, **{setting: name})).by_setting.values()
        if setting == "arpa":
            found.append(arpa_text(file.restricted_arpa(lexicon.pronunciations).model))
        else:
            found.append(str(file.sentences(lexicon.pronunciations)))
    assert found[0] == found[1]
    assert "caf\u00e9" in found[1]


def test_marks_of_sentences_are_no_words(run: Path) -> None:
    """Tools write them around each line; within one they are an error."""
    (run / "corpus" / "marked.txt").write_text("<s> a b </s>\nb\n<s> </s>\n")
    (run / "corpus" / "joined.txt").write_text("a b\na </s> <s> b\n")
    marked, joined = (
        files_of(run, replace(PLAIN, language_model_text=name)).by_setting["language_model_text"]
        for name in ("marked.txt", "joined.txt")
    )
    assert marked.sentences("ab") == [["a", "b"], ["b"]]
    assert marked.spellable_words(["a", "-b"], 3) == {"b": 2}
    with pytest.raises(ValueError, match=r"joined\.txt: line 2: <s> or </s> within: need one"):
        joined.sentences("ab")


def test_lines_end_in_line_feeds(run: Path) -> None:
    """By carriage returns alone, a text would be one sentence."""
    (run / "corpus" / "old.txt").write_bytes(b"a b\r\na\rb\n")
    config = replace(PLAIN, language_model_text="old.txt")
    with pytest.raises(ValueError, match=r"old\.txt: line 2: carriage returns within: need ends"):
        files_of(run, config).by_setting["language_model_text"].sentences("ab")


@pytest.mark.parametrize("setting", ["arpa", "language_model_text"])
def test_a_gzip_is_the_file_that_it_holds(run: Path, setting: str) -> None:
    """A model or a text in gzip, whatever its name, gives the same model as without."""
    text = "a b\nb\n"
    data = kneser_ney_arpa([["a", "b"]], ["a", "b"], 2) if setting == "arpa" else text
    (run / "corpus" / "plain").write_text(data)
    (run / "corpus" / "packed").write_bytes(gzip.compress(data.encode()))
    plain_arpa, packed_arpa = (
        arpa_of(run, replace(PLAIN, **{setting: name})) for name in ("plain", "packed")
    )
    assert packed_arpa == plain_arpa


@pytest.mark.parametrize("min_counts", [(2, 2), (1, 3, 2)])
def test_least_counts_that_would_leave_histories_out_are_refused(
    min_counts: tuple[int, ...],
) -> None:
    """All words have a unigram, and what is listed has its history and suffix listed."""
    with pytest.raises(ValueError, match=r"min_counts = .*: need 1 for unigrams, .* and no less"):
        replace(PLAIN, min_counts=min_counts)


def test_a_text_for_a_given_model_is_refused() -> None:
    """A given model is estimated from no text, so a recipe names one of them."""
    with pytest.raises(ValueError, match=r"arpa = 'a' and language_model_text = 't': need one"):
        replace(PLAIN, arpa="a", language_model_text="t")
