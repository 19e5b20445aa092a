"""Cuts and Shar that lhotse itself wrote have the samples that lhotse reads."""

from pathlib import Path

import lhotse
import numpy as np

from infra.store.object_store import Fetched, ObjectStore, SizeBound
from pipeline.audio.conversion import ANY_AUDIO
from pipeline.audio.decode import decode_audio
from pipeline.records import Utterance
from pipeline.steps.audio_reads import WantedAudio, read_audio
from pipeline.steps.ingestion.lhotse import Lhotse, Shar
from pipeline.steps.ingestion.manifest_format import FormatOptions, ManifestFormat
from pipeline.steps.ingestion.manifest_records import RecordRules, records_of, with_audio
from tests.small_corpus import tone, wav


def read(store: ObjectStore, form: ManifestFormat, uri: str) -> dict[str, np.ndarray]:
    """Read each record's samples by its part."""
    samples = {}
    for piece in form.pieces(store, uri):
        rows = with_audio(form.rows(store, piece), piece.folder, store.allowed_prefixes)
        for record in records_of(rows, RecordRules("und", 4), "unlabelled"):
            assert isinstance(record, Utterance), record
            wanted = WantedAudio(record.audio_uri, SizeBound(), record.part, ANY_AUDIO)
            [found] = read_audio(store, [wanted], 1)
            assert isinstance(found, Fetched)
            samples[record.utterance_id] = decode_audio(found.data)
    return samples


def test_lhotse_reads_the_same_samples(tmp_path: Path) -> None:
    """By cuts, by supervisions with recordings, and by Shar; whole and cut recordings."""
    store = ObjectStore((str(tmp_path),))
    for name in ("a", "b"):
        (tmp_path / f"{name}.wav").write_bytes(wav(tone(ord(name), 3)))
    recordings = lhotse.RecordingSet.from_recordings(
        lhotse.Recording.from_file(tmp_path / f"{name}.wav") for name in ("a", "b")
    )
    supervisions = lhotse.SupervisionSet.from_segments(
        lhotse.SupervisionSegment(f"{name}{n}", name, start=n * 0.75, duration=0.7, speaker=name)
        for name in ("a", "b")
        for n in range(3)
    )
    cuts = lhotse.CutSet.from_manifests(recordings, supervisions).trim_to_supervisions()
    cuts = lhotse.CutSet.from_cuts(
        [*(cut.with_id(cut.supervisions[0].id) for cut in cuts), recordings["a"].to_cut()]
    )
    expected = {cut.id: cut.load_audio()[0] for cut in cuts}
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    recordings.to_file(tmp_path / "recordings.jsonl.gz")
    supervisions.to_file(tmp_path / "supervisions.jsonl.gz")
    (tmp_path / "shar").mkdir()
    cuts.to_shar(tmp_path / "shar", fields={"recording": "flac"}, shard_size=3)
    joined = Lhotse(FormatOptions(recordings_uri=str(tmp_path / "recordings.jsonl.gz")))
    for form, uri in (
        (Lhotse(), "cuts.jsonl.gz"),
        (joined, "supervisions.jsonl.gz"),
        (Shar(), "shar"),
    ):
        found = read(store, form, str(tmp_path / uri))
        names = {each.id for each in supervisions} if form is joined else expected.keys()
        assert found.keys() == names
        for name, samples in found.items():
            np.testing.assert_array_equal(samples, expected[name], err_msg=f"{uri} {name}")
