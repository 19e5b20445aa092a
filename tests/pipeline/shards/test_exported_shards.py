"""Exported shards are read back by Kaldi's own code and by lhotse, as they were stored."""

import gzip
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import kaldi_native_io
import lhotse
import numpy as np
import pytest

from pipeline.kbest import KBest, best_probabilities
from pipeline.shards import Alignment, FeatureRow, PartitionRow
from pipeline.shards.exported import KaldiFolder, write_shar
from tests.training.data.partition_rows import row, row_at_all_offsets


def named(rows: Sequence[PartitionRow]) -> list[PartitionRow]:
    return [replace(each, text=f"said {n}") for n, each in enumerate(rows)]


SOFT = named([row(number, 30 + 10 * number, soft=True) for number in range(5)])
HARD = named([row(number, 30 + 10 * number) for number in range(5)])


def feature_row(source: PartitionRow) -> FeatureRow:
    return FeatureRow(
        source.utterance_id, "s", source.duration_ms, "", "", "", None, None, source.features
    )


def write_kaldi(folder: Path, rows: Sequence[FeatureRow | PartitionRow]) -> None:
    written = KaldiFolder(folder)
    for number, some in enumerate((rows[3:], rows[:3])):
        written.write_shard(number, some)
    written.finish()


def features_by_scp(folder: Path) -> dict[str, np.ndarray]:
    with kaldi_native_io.SequentialFloatMatrixReader(f"scp:{folder}/feats.scp") as reader:
        return {key: np.array(value) for key, value in reader}


def test_kaldi_reads_features_and_posteriors(tmp_path: Path) -> None:
    """Features are the stored ones; posteriors are the teacher's probabilities of the k best."""
    write_kaldi(tmp_path, SOFT)
    features = features_by_scp(tmp_path)
    assert list(features) == [each.utterance_id for each in SOFT]
    for each in SOFT:
        np.testing.assert_array_equal(features[each.utterance_id], each.features)
    with kaldi_native_io.SequentialPosteriorReader(f"scp:{tmp_path}/post.scp") as reader:
        posteriors = dict(reader)
    for each in SOFT:
        assert isinstance(each.targets, KBest)
        expected = best_probabilities(each.targets)
        found = posteriors[each.utterance_id]
        assert [[s for s, _ in frame] for frame in found] == each.targets.senones.tolist()
        np.testing.assert_allclose([[p for _, p in frame] for frame in found], expected, rtol=1e-6)
    utterances = [each.utterance_id for each in SOFT]
    speakers = (tmp_path / "spk2utt").read_text().splitlines()
    # As utt2spk is sorted: Kaldi's validate_data_dir.sh compares the two line by line.
    assert speakers == [" ".join(("speaker", *sorted(utterances)))]
    assert str(tmp_path / "feats.") in (tmp_path / "feats.scp").read_text()
    offsets = dict(line.split() for line in (tmp_path / "utt2offset").read_text().splitlines())
    assert offsets == {each.utterance_id: str(each.offset) for each in SOFT}
    assert (tmp_path / "text").read_text().splitlines()[1] == "utterance-1 said 1"
    assert (tmp_path / "utt2spk").read_text().splitlines()[0] == "utterance-0 speaker"


def test_kaldi_reads_alignments(tmp_path: Path) -> None:
    """Hard targets are the senone of every 10 ms frame, read in any order by the scp file."""
    write_kaldi(tmp_path, HARD)
    reader = kaldi_native_io.RandomAccessInt32VectorReader(f"scp:{tmp_path}/ali.scp")
    for each in reversed(HARD):
        assert isinstance(each.targets, Alignment)
        assert list(reader[each.utterance_id]) == each.targets.senones.tolist()
    reader.close()


def test_kaldi_refuses_ids_with_a_space(tmp_path: Path) -> None:
    """A key ends at the first space, so another utterance would be read."""
    with pytest.raises(ValueError, match=r"'a b' has a space: .* lhotse Shar"):
        KaldiFolder(tmp_path).write_shard(0, [replace(SOFT[0], utterance_id="a b")])


def write_all_shar(folder: Path, rows: Sequence[FeatureRow | PartitionRow]) -> lhotse.CutSet:
    for number, some in enumerate((rows[:3], rows[3:])):
        write_shar(folder, number, some)
    return lhotse.CutSet.from_shar(in_dir=folder)


def test_lhotse_reads_features_and_kbest_targets(tmp_path: Path) -> None:
    """Each cut has its features, and senones, logits and log Z at 33 Hz, to the bit."""
    cuts = list(write_all_shar(tmp_path, SOFT))
    assert [cut.id for cut in cuts] == [each.utterance_id for each in SOFT]
    for cut, each in zip(cuts, SOFT, strict=True):
        assert isinstance(each.targets, KBest)
        np.testing.assert_array_equal(cut.load_features(), each.features)
        for name in ("senones", "logits", "log_z"):
            found = getattr(cut, f"load_{name}")()
            np.testing.assert_array_equal(found, getattr(each.targets, name))
        assert cut.custom["offset"] == each.offset
        assert (cut.supervisions[0].text, cut.supervisions[0].speaker) == (each.text, "speaker")
        assert cut.duration == pytest.approx(len(each.features) / 100)
        lhotse.validate(cut)


def test_lhotse_reads_any_cut_by_its_index(tmp_path: Path) -> None:
    """As lhotse 2.0 resumes: from plain lines, which gunzip makes."""
    write_all_shar(tmp_path, SOFT)
    for path in tmp_path.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    cut = lhotse.CutSet.from_shar(in_dir=tmp_path, indexed=True)[4]
    assert cut.id == SOFT[4].utterance_id
    np.testing.assert_array_equal(cut.load_features(), SOFT[4].features)


def test_lhotse_reads_alignments_and_features_alone(tmp_path: Path) -> None:
    """Labelled cuts have the senone of every frame; held-out ones have features and no targets."""
    (tmp_path / "hard").mkdir()
    (tmp_path / "plain").mkdir()
    for cut, each in zip(write_all_shar(tmp_path / "hard", HARD), HARD, strict=True):
        assert isinstance(each.targets, Alignment)
        np.testing.assert_array_equal(cut.load_alignment(), each.targets.senones)
    plain = [feature_row(each) for each in HARD]
    for cut, each in zip(write_all_shar(tmp_path / "plain", plain), plain, strict=True):
        np.testing.assert_array_equal(cut.load_features(), each.features)
    assert {path.name.partition(".")[0] for path in (tmp_path / "plain").iterdir()} == {
        "cuts",
        "features",
    }


def test_targets_at_all_offsets_are_exported_at_their_own(tmp_path: Path) -> None:
    """Three views would be three utterances of one id: the row's own offset is taken."""
    rows = [row_at_all_offsets(number, 40) for number in range(5)]
    for cut, each in zip(write_all_shar(tmp_path, rows), rows, strict=True):
        own = each.targets.at(each.offset)
        np.testing.assert_array_equal(cut.load_senones(), own.senones)


def test_equal_rows_make_equal_shards(tmp_path: Path) -> None:
    """Neither a gzip's nor a tar's time of day is in the bytes."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_shar(tmp_path / name, 0, SOFT)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize("name", ["s3://b/a.wav", "./a", "a//b"])
def test_an_id_that_no_member_can_have_is_refused(tmp_path: Path, name: str) -> None:
    """lhotse reads another one back."""
    with pytest.raises(ValueError, match="lhotse reads another id from a tar: export to Kaldi"):
        write_shar(tmp_path, 0, [replace(feature_row(HARD[0]), utterance_id=name)])
