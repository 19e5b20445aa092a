"""The bootstrap: what it refuses before hours of work, and what it says of the tree."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import join_uri
from jobs.bootstrap import unreached_senones
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import BOOTSTRAP_STEP, DEV, UNLABELLED
from tests.job_programs import RunJob
from tests.training.align.labelled_run import shards, write_features_of, write_labelled
from tests.whole_path.processes import TINY

CONFIG = {"senones": {"max_senones": 200, "min_count": 150}}


def said(**statistics: Any) -> str:
    return unreached_senones(Manifest(BOOTSTRAP_STEP, CONFIG, {}, (), statistics=statistics))


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        ("min_count", "a side below senones.min_count = 150 frames; lower it for more"),
        ("contexts", "the transcripts have no more triphones to tell apart"),
    ],
)
def test_the_bound_is_named_with_its_remedy(bound: str, reason: str) -> None:
    """The line has the senones, the number asked for, and the setting that stops the tree."""
    line = said(num_senones=133, senone_bound=bound)
    assert line.startswith("133 senones of max_senones = 200: ")
    assert line.endswith(reason)


def test_nothing_is_said_of_a_tree_as_large_as_asked_for() -> None:
    """Then there is nothing to set."""
    assert said(num_senones=200, senone_bound="max_senones") == ""


@pytest.mark.parametrize(
    ("rule", "word", "others"),
    [("row", "wasp", "'letters' or 'spn'"), ("letters", "1984", "'spn'")],
)
def test_words_of_the_development_speakers_are_compared_before_the_aligner(
    tmp_path: Path, run_job: RunJob, rule: str, word: str, others: str
) -> None:
    """Though they are aligned last; the remedy is another rule than the recipe's."""
    parts = shards()
    store, run_uri, corpus_uri = write_labelled(tmp_path, parts)
    write_features_of(store, run_uri, UNLABELLED, parts)
    write_features_of(store, run_uri, DEV, [[replace(parts[0][0], text=f"see a {word}")]])
    sets = (f'corpus.uri="{corpus_uri}"', f'corpus.unknown_words="{rule}"')
    options = [part for each in sets for part in ("--set", each)]
    said = run_job("bootstrap", "--recipe", str(TINY), "--run", run_uri, *options)
    assert said.code == 3
    assert f"lexicon.txt lacks 1 word, in 1 of 1 dev utterances: '{word}'" in said.err
    assert f"set corpus.unknown_words = {others}, or raise loss_budget" in said.err
    assert (rule == "letters") or not list(store.list(join_uri(run_uri, BOOTSTRAP_STEP)))
