"""A recognizer of a stream writes the words of the batch, and the archive keeps all it needs."""

import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.settings import ConfigurationError
from pipeline.audio.decode import decode_audio
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import HELDOUT, STUDENT, features_step
from pipeline.shards import read_features
from tests.small_corpus import flac, tone
from tests.training.export.heard_run import heard_recipe, write_heard_run
from training.align.network_alignment import log_likelihoods
from training.decode.decoder import DecoderConfig, StreamingSearch, decode, find_lattice
from training.export import recognizer as recognizer_module
from training.export.archive import (
    MEMBERS,
    SETTINGS,
    WORDS,
    ExportedModel,
    read_archive,
    write_archive,
)
from training.export.export_model import export_model, score_heldout, transcribe_heldout
from training.export.recognizer import EXTERNAL_DATA, EnergyStream, Recognizer, StreamingModel
from training.models.store import load_model

Run = tuple[object, str, str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write_heard_run(tmp_path_factory.mktemp("heard"))


@pytest.fixture(scope="module")
def exported(run: Run) -> ExportedModel:
    return export_model(*run[:2], heard_recipe(), STUDENT)


@pytest.mark.parametrize("piece_s", [0.01, 0.3, 100.0])
def test_heldout_words_are_those_of_evaluation(
    run: Run, exported: ExportedModel, piece_s: float
) -> None:
    """Audio in pieces of 10 ms, 300 ms or whole gives the words of stored features by torch.

    A speaker's later utterances need the causal mean of the earlier ones.
    """
    store, run_uri, corpus_uri = run
    recipe = heard_recipe()
    trained = load_model(store, run_uri, STUDENT, recipe.models.student)
    expected = {}
    for output in read_manifest(store, run_uri, features_step(HELDOUT)).outputs:
        rows = read_features(read_output(store, run_uri, output))
        scores = log_likelihoods(rows, trained, recipe.evaluation.acoustic_scale)
        for row, scored in zip(rows, scores, strict=True):
            lattice = find_lattice(exported.graph, scored, exported.settings.decoder)
            assert lattice is not None
            expected[row.utterance_id] = exported.second_pass.best(lattice).words
    heard = transcribe_heldout(store, run_uri, corpus_uri, recipe.features, exported, piece_s)
    assert {utterance.utterance_id: words for utterance, words in heard} == expected
    assert len(set(expected.values())) > 1


def test_the_score_counts_every_heldout_word(run: Run, exported: ExportedModel) -> None:
    """Six utterances are heard; their reference words are the transcripts'."""
    found = score_heldout(*run, heard_recipe().features, exported, 0.3)
    assert (found.num_utterances, found.num_refused) == (6, 0)
    assert found.errors.reference_words == 3 + 2 + 2 + 2 + 2 + 3


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 2_000), min_size=1, max_size=20),
    engine=st.sampled_from(["fast", "kaldi"]),
)
def test_energies_of_a_stream_are_those_of_the_whole(sizes: list[int], engine: str) -> None:
    """Pieces of any lengths, down to one sample, change no bit of either filter bank."""
    samples = tone(1, 1.0).astype(np.float32)[: sum(sizes)]
    stream = EnergyStream(engine)
    edges = np.cumsum([0, *sizes])
    parts = [stream.accept(samples[a:b]) for a, b in pairwise(edges)]
    found = np.concatenate([*parts, stream.incomplete])
    if len(samples) < 400:
        assert len(found) == 0
        return
    np.testing.assert_array_equal(found, log_mel_energies(samples, engine))
    assert len(stream.incomplete) < 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_sound_is_refused(value: float) -> None:
    """The fast filter bank would make energies of it."""
    with pytest.raises(ValueError, match="samples are not finite"):
        EnergyStream("fast").accept(np.full(9, value, np.float32))


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_a_search_in_pieces_is_the_search_of_the_whole(
    exported: ExportedModel, sizes: list[int], seed: int
) -> None:
    """Pieces of 0 to 9 frames end with the best path that the whole has."""
    generator = np.random.default_rng(seed)
    shape = (sum(sizes), exported.graph.num_senones)
    scores = generator.normal(0, 2, size=shape).astype(np.float32)
    config = DecoderConfig(8.0, 200)
    search = StreamingSearch(exported.graph, config)
    edges = np.cumsum([0, *sizes])
    for first, last in pairwise(edges):
        search.advance(scores[first:last])
        search.best(ends_sentence=False)
    path = search.best(ends_sentence=True)
    if not len(scores):
        assert path is None
        return
    assert path is not None
    assert list(path.words) == decode(exported.graph, scores, config)
    assert len(path.senones) == len(scores)


def test_a_pause_ends_an_utterance_and_the_stream_continues(exported: ExportedModel) -> None:
    """A second of what the model hears as silence cuts the stream; times are the stream's."""
    model = StreamingModel(exported.network)
    samples = np.tile(tone(2, 3.0).astype(np.float32), 2)
    silent = set(range(exported.graph.num_senones))
    settings = type(exported.settings)(
        **{
            **{name: getattr(exported.settings, name) for name in exported.settings.__slots__},
            "silence": tuple(sorted(silent)),
        }
    )
    everything = replace(exported, settings=settings)
    recognizer = Recognizer(everything, model, pause_s=1.0)
    found = [recognizer.accept(samples[first : first + 1_600]) for first in range(0, 96_000, 1_600)]
    finals = [each for each in found if each.is_final]
    assert len(finals) == 5
    assert finals[0].start_s == 0
    assert all(a.end_s == b.start_s for a, b in pairwise(finals))
    assert recognizer.finish().end_s == pytest.approx(5.97)
    never = Recognizer(exported, model)
    assert not any(never.accept(samples[i : i + 1_600]).is_final for i in range(0, 96_000, 1_600))


def test_a_long_utterance_ends(
    run: Run, exported: ExportedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lattice has no more rows than memory is for; no word of the held-out audio is lost."""
    monkeypatch.setattr(recognizer_module, "MAX_UTTERANCE_ROWS", 20)
    recognizer = Recognizer(exported, StreamingModel(exported.network))
    found = [
        recognizer.accept(tone(2, 3.0).astype(np.float32)[i : i + 480])
        for i in range(0, 48_000, 480)
    ]
    finals = [each for each in found if each.is_final]
    assert len(finals) == 4
    assert all(each.end_s - each.start_s == pytest.approx(0.6) for each in finals)
    place = *run, heard_recipe().features
    heard = transcribe_heldout(*place, exported, 0.03)
    assert all(words for _, words in heard)


def test_equal_models_make_equal_archives_that_read_back(
    exported: ExportedModel, tmp_path: Path
) -> None:
    """The bytes repeat; what is read back recognizes the same words."""
    first, second = tmp_path / "a.zip", tmp_path / "b.zip"
    assert write_archive(first, exported) == first.stat().st_size
    write_archive(second, exported)
    assert first.read_bytes() == second.read_bytes()
    read = read_archive(first)
    assert read.settings == exported.settings
    assert read.graph.words == exported.graph.words
    for name in ("first_pass", "grammar"):
        assert getattr(read, name).to_bytes() == getattr(exported, name).to_bytes()
    samples = decode_audio(flac(tone(3, 1.2)))
    words = []
    for model in (exported, read):
        recognizer = Recognizer(model, StreamingModel(model.network))
        recognizer.accept(samples)
        words.append(recognizer.finish())
    assert words[0] == words[1]
    assert len(words[0].confidences) == len(words[0].words) > 0
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def forged(source: Path, path: Path, name: str, data: bytes, how: int) -> Path:
    """Copy an archive with other bytes for a member, packed by the method `how`."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for member in MEMBERS:
            is_other = member == name
            kind = how if is_other else zipfile.ZIP_DEFLATED
            new.writestr(member, data if is_other else old.read(member), kind)
    return path


DEFLATED = zipfile.ZIP_DEFLATED


@pytest.mark.parametrize(
    ("name", "data", "how", "said"),
    [
        (WORDS, b"\n" * 10**7, DEFLATED, "words.txt has 10000000 bytes: need at most 1048576"),
        (WORDS, b"<eps>\na\x1b[2J\n#0\n", DEFLATED, r"words\.txt: .* has U\+001B, a control"),
        (SETTINGS, b"{}", zipfile.ZIP_LZMA, r"model\.json is packed by method 14: need deflate"),
    ],
)
def test_a_forged_archive_is_refused(
    exported: ExportedModel, tmp_path: Path, name: str, data: bytes, how: int, said: str
) -> None:
    """Before it takes memory, and before its words reach a terminal."""
    write_archive(tmp_path / "a.zip", exported)
    path = forged(tmp_path / "a.zip", tmp_path / "b.zip", name, data, how)
    with pytest.raises(ConfigurationError, match=said):
        read_archive(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no network of ONNX: .* need a model that megahour export wrote"),
        (b"onnx", "no network of ONNX: "),
        (b"a" + EXTERNAL_DATA + b"b", "names weights in another file"),
    ],
)
def test_a_network_that_is_none_is_refused(data: bytes, said: str) -> None:
    """Also one that would read a file of the machine."""
    with pytest.raises(ConfigurationError, match=said):
        StreamingModel(data)


def test_a_network_of_other_senones_is_refused(exported: ExportedModel) -> None:
    """Both numbers are in the message."""
    priors = exported.settings.log_priors[1:]
    other = replace(exported, settings=replace(exported.settings, log_priors=priors))
    said = f"a network of {len(priors) + 1} senones for {len(priors)} priors"
    with pytest.raises(ConfigurationError, match=said):
        Recognizer(other, StreamingModel(other.network))


def test_a_missing_archive_is_named(tmp_path: Path) -> None:
    """A path without a file is no traceback."""
    with pytest.raises(ConfigurationError, match=r"none\.zip: cannot be read: No such file"):
        read_archive(tmp_path / "none.zip")
