"""Compare the phone boundaries of a run's alignments with Kaldi's, and with true times.

python -m tests.benchmarks.phone_boundaries --run DIR [--kaldi-dir DIR [--everyone]] [--json]

DIR is a run in which `align` has finished. Kaldi's are those of kaldi-hmm-gmm on the same cepstra,
in a process of its own; true times are those of `phones.ctm` in a synthetic corpus. `--everyone`
bootstraps all subsets at once, with the transcripts of the data directory. A boundary is
the first frame of a phone that both sides have in the same place of the utterance.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from infra.store.object_store import ObjectStore, join_uri
from pipeline.filterbank import FRAME_SHIFT_MS, WINDOW_MS
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BOOTSTRAP_STEP,
    CORPUS_FOLDER,
    LABELLED,
    SUBSETS,
    features_step,
)
from pipeline.shards import Alignment, read_partition
from tests.benchmarks.measure import Figure, show
from training.align.labelled import read_shards, transcribed
from training.align.monophone_hmm import bootstrap_alignment, speaker_cepstra
from training.align.network_alignment import read_tree
from training.decode.lexicon import SILENCE, Lexicon, parse_lexicon
from training.decode.senones import SenoneTree, TranscribedUtterance
from training.settings.decoding import BootstrapConfig

TOLERANCES_MS = (10, 20, 30, 50)
FIRST_BOUNDARY_MS = WINDOW_MS / 2 - FRAME_SHIFT_MS / 2
"""The middle between two windows lies so much after the first sample of the second."""

Phones = list[tuple[str, float]]
"""The phones of an utterance in order, with the times at which they begin, in ms."""


def from_senones(senones: np.ndarray, tree: SenoneTree) -> Phones:
    """Return the phones of a senone alignment; equal phones in a row are one."""
    centre = np.empty(tree.num_senones, np.int64)
    for phone in range(len(tree.phones)):
        centre[np.unique(tree.table[:, phone])] = phone
    spoken = centre[senones]
    starts = np.flatnonzero(np.diff(spoken, prepend=-1))
    return [(tree.phones[spoken[start]], frame_time(start)) for start in starts]


def frame_time(start: int) -> float:
    """Return the time in ms at which a segment begins whose first frame is `start`."""
    return start * FRAME_SHIFT_MS + FIRST_BOUNDARY_MS if start else 0.0


def joined(phones: Phones) -> Phones:
    """Join equal phones in a row, as senones cannot tell them apart."""
    return [each for n, each in enumerate(phones) if n == 0 or phones[n - 1][0] != each[0]]


def lateness(ours: Phones, theirs: Phones) -> list[tuple[str, float]]:
    """Return by how many ms each phone that both have begins later in ours, without silences."""
    one, other = ([each for each in joined(p) if each[0] != SILENCE] for p in (ours, theirs))
    matcher = SequenceMatcher(None, [p for p, _ in one], [p for p, _ in other], autojunk=False)
    return [
        (one[block.a + n][0], one[block.a + n][1] - other[block.b + n][1])
        for block in matcher.get_matching_blocks()
        for n in range(block.size)
    ]


def compared(name: str, ours: Mapping[str, Phones], theirs: Mapping[str, Phones]) -> list[Figure]:
    """Return the share of phones that both have, and of their boundaries within the tolerances."""
    common = sorted(ours.keys() & theirs.keys())
    found = [ms for each in common for _, ms in lateness(ours[each], theirs[each])]
    num_phones = sum(sum(p != SILENCE for p, _ in joined(theirs[each])) for each in common)
    figures = [Figure.of(f"{name}: boundaries compared", [100 * len(found) / num_phones], "%")]
    median = float(np.median(found))
    figures.append(Figure.of(f"{name}: median lateness", [median], "ms"))
    for tolerance in TOLERANCES_MS:
        share = 100 * float(np.mean(np.abs(found) <= tolerance))
        figures.append(Figure.of(f"{name}: within {tolerance} ms", [share], "%"))
    return figures


def aligned(store: ObjectStore, run_uri: str, step: str) -> dict[str, Phones]:
    """Return the phones of a step of alignment by utterance."""
    tree = read_tree(store, run_uri)
    return {
        row.utterance_id: from_senones(row.targets.senones, tree)
        for output in read_manifest(store, run_uri, step).outputs
        for row in read_partition(read_output(store, run_uri, output))
        if isinstance(row.targets, Alignment)
    }


def read_utterances(
    store: ObjectStore, run_uri: str, subsets: Sequence[str]
) -> list[TranscribedUtterance]:
    """Return the utterances of some subsets."""
    shards = [read_shards(store, run_uri, features_step(subset)) for subset in subsets]
    return [transcribed(row) for each in shards for rows in each.values() for row in rows]


def of_everyone(
    store: ObjectStore, run_uri: str, lexicon: Lexicon, texts: Sequence[str]
) -> Iterator[Figure]:
    """Compare the bootstrap of all utterances with Kaldi's; the untranscribed get their texts."""
    words = {line.split()[0]: tuple(line.split()[1:]) for line in texts}
    utterances = [
        replace(each, words=words[each.utterance_id])
        for each in read_utterances(store, run_uri, SUBSETS)
    ]
    ours = {
        name: [
            (lexicon.phones[phone], frame_time(start))
            for phone, start in zip(found.phones.tolist(), found.starts.tolist(), strict=True)
        ]
        for name, found in bootstrap_alignment(
            utterances, lexicon, BootstrapConfig()
        ).alignments.items()
    }
    yield from compared(
        "everyone, bootstrap against kaldi-hmm-gmm", ours, by_kaldi(utterances, lexicon)
    )


def by_kaldi(utterances: Sequence[TranscribedUtterance], lexicon: Lexicon) -> dict[str, Phones]:
    """Align by kaldi-hmm-gmm, which must not share a process with torch."""
    cepstra = speaker_cepstra(utterances)
    task = {
        "lexicon": dict(lexicon.pronunciations),
        "words": {each.utterance_id: each.words for each in utterances},
        "phones": lexicon.phones,
    }
    with tempfile.TemporaryDirectory() as folder:
        frames, texts, result = (str(Path(folder) / n) for n in ("f.npz", "t.json", "r.json"))
        np.savez(frames, **cepstra)
        Path(texts).write_text(json.dumps(task))
        command = [sys.executable, "-m", "tests.benchmarks.kaldi_monophones", frames, texts, result]
        subprocess.run(command, check=True)
        found = json.loads(Path(result).read_text())
    return {
        name: [(phone, frame_time(start)) for phone, start in phones]
        for name, phones in found.items()
    }


def true_times(lines: Sequence[str]) -> dict[str, Phones]:
    """Read Kaldi's time-marked phones: utterance, channel, start and duration (s), phone."""
    phones: dict[str, Phones] = {}
    for line in lines:
        name, _, start_s, _, phone = line.split()
        phones.setdefault(name, []).append((phone, 1000 * float(start_s)))
    return phones


def figures(run_uri: str, kaldi_dir: Path | None, has_everyone: bool) -> Iterator[Figure]:
    """Yield all comparisons of a run."""
    store = ObjectStore((run_uri,))
    lexicon = parse_lexicon(store.get(join_uri(run_uri, CORPUS_FOLDER, "lexicon.txt")).decode())
    ours = {step: aligned(store, run_uri, step) for step in (BOOTSTRAP_STEP, ALIGNMENT_STEP)}
    kaldi = by_kaldi(read_utterances(store, run_uri, [LABELLED]), lexicon)
    for step, phones in ours.items():
        yield from compared(f"{step} against kaldi-hmm-gmm", phones, kaldi)
    ctm = kaldi_dir / "phones.ctm" if kaldi_dir else None
    if ctm is not None and ctm.exists():
        truth = true_times(ctm.read_text().splitlines())
        for name, phones in (*ours.items(), ("kaldi-hmm-gmm", kaldi)):
            yield from compared(f"{name} against the true times", phones, truth)
    if kaldi_dir is not None and has_everyone:
        texts = (kaldi_dir / "text").read_text().splitlines()
        yield from of_everyone(store, run_uri, lexicon, texts)


def main() -> None:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="folder of a run that is aligned")
    parser.add_argument("--kaldi-dir", type=Path, help="its Kaldi data directory")
    parser.add_argument("--everyone", action="store_true", help="bootstrap all subsets, too")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = list(figures(arguments.run, arguments.kaldi_dir, arguments.everyone))
    show("Phone boundaries", found, arguments.json)


if __name__ == "__main__":
    main()
