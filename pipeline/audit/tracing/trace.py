"""Trace one utterance: metadata, selection, features, targets, partitions, models.

The selections' id indexes name the objects that hold an utterance, and the order of each
manifest's outputs gives the task of the next step. So a search reads the ids of a shard or two. A
run of an older version has no id index: there it reads files and metadata until it finds the id.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from types import MappingProxyType
from typing import Any

from infra.store.checked_reads import read_checked
from infra.store.object_store import ObjectStore, join_uri
from pipeline.audit.tracing.id_lookup import IdLookup
from pipeline.audit.tracing.metadata_record import audio_now, why_unselected
from pipeline.audit.tracing.search import Hit, in_metadata, in_step, own_place
from pipeline.records import Quarantined, Utterance
from pipeline.runs.commit import Commit
from pipeline.runs.loss_watch import WITHOUT_LATTICE
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest, sha256
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    ALL_SUBSETS,
    BOOTSTRAP_STEP,
    COMMITS_FOLDER,
    DEV,
    DEV_ALIGNMENT_STEP,
    FEATURES_FOLDER,
    INGEST_STEP,
    LABELLED,
    LATTICES_FOLDER,
    MANIFEST_FILE,
    METADATA_FOLDER,
    MODELS_FOLDER,
    UNLABELLED,
    TargetsRound,
    earlier_alignment,
    features_step,
    folder_of,
    lattices_step,
    model_step,
    selection_step,
    targets_rounds,
    task_name,
)
from pipeline.steps.repartition import shard_groups

NO_FACTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepTrace:
    """StepTrace holds an utterance's outcome at one step, the object, and its line or row.

    Lines count from 1, rows of shards from 0; metadata lies in the corpus, the rest in the run.
    """

    step: str
    outcome: str
    object: str = ""
    position: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    config_digest: str = ""
    code_version: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace holds an utterance's steps in order, its audio then and now, and its models."""

    utterance_id: str
    steps: tuple[StepTrace, ...]
    audio: Mapping[str, Any]
    models: Mapping[str, str]


class UnknownUtteranceError(ValueError):
    """No metadata, selection file or ledger of the run names the utterance."""


def trace(store: ObjectStore, run_uri: str, corpus_uri: str, utterance_id: str) -> Trace:
    """Follow an utterance through a run; UnknownUtteranceError if nothing names it."""
    lookup = IdLookup(store, run_uri, corpus_uri, utterance_id)
    return _Tracer(store, run_uri, corpus_uri, utterance_id, lookup).trace()


@dataclass(slots=True)
class _Tracer:
    store: ObjectStore
    run_uri: str
    corpus_uri: str
    utterance_id: str
    lookup: IdLookup
    steps: list[StepTrace] = field(default_factory=list)

    def trace(self) -> Trace:
        selections = {subset: self._manifest(selection_step(subset)) for subset in ALL_SUBSETS}
        record: Mapping[str, Any] = {}
        for subset, manifest in selections.items():
            hit = manifest and self.lookup.in_files(manifest)
            if manifest and hit:
                record = hit.facts
                self._metadata({subset: manifest}, record.get("created_at"))
                self._add(manifest, "selected", hit, {})
                self._follow(subset, own_place(self.store, manifest, hit.key)[0])
                break
        else:
            record = self._explain_absence(selections)
        etag = next((e.facts["audio_etag"] for e in self.steps if "audio_etag" in e.facts), None)
        has_audio = bool(record.get("audio_uri"))
        audio = audio_now(self.store, self.corpus_uri, record, etag) if has_audio else {}
        return Trace(self.utterance_id, tuple(self.steps), audio, self._models())

    def _follow(self, subset: str, number: int) -> None:
        """Follow the utterance from the selection file with this number."""
        features = self._manifest(features_step(subset))
        hit = self._at_step(features, features_step(subset), task_name(number))
        if features is None or hit is None:
            return
        # Task n of a step reads output n of the manifest before, so the place names the task.
        place, num_shards = own_place(self.store, features, hit.key)
        task = task_name(place)
        if subset == LABELLED:
            for step in (
                BOOTSTRAP_STEP,
                *self._begun(map(earlier_alignment, count(1))),
                ALIGNMENT_STEP,
            ):
                self._at_step(self._manifest(step), step, task)
            # Without sequence training there are none, and no step is unfinished.
            for model in self._finished(LATTICES_FOLDER):
                step = lattices_step(model)
                self._at_step(self._manifest(step), step, task)
        if subset == DEV:
            self._at_step(self._manifest(DEV_ALIGNMENT_STEP), DEV_ALIGNMENT_STEP, task)
        if subset == UNLABELLED:
            # The run has begun the rounds before the last, and that one.
            early = (TargetsRound(number, number + 1).targets for number in count(1))
            for each in targets_rounds(1 + len(self._begun(early))):
                self._follow_round(each, place, num_shards)

    def _follow_round(self, targets_round: TargetsRound, place: int, num_shards: int) -> None:
        """Follow the utterance of the feature shard at `place` through a round of targets."""
        targets, task = self._manifest(targets_round.targets), task_name(place)
        without = self._without_lattice(targets, task)
        if self._at_step(targets, targets_round.targets, task, without) is None and targets:
            return
        partitions = self._manifest(targets_round.partitions)
        size = partitions.config["num_source_shards"] if partitions else 1
        # Repartition's own rule says in which group of shards the place lies.
        groups = enumerate(shard_groups(num_shards, size))
        group = next(number for number, shards in groups if place in shards)
        self._at_step(partitions, targets_round.partitions, task_name(group))

    def _without_lattice(self, targets: Manifest | None, task: str) -> Mapping[str, Any]:
        """Return why the utterance has the teacher's own targets, if its lattice was asked for."""
        if targets is None or WITHOUT_LATTICE not in targets.statistics:
            return {}
        uri = join_uri(self.run_uri, targets.step, COMMITS_FOLDER, f"{task}.json")
        commit = read_checked(self.store, uri, Commit.from_bytes)
        found = commit.statistics.get(WITHOUT_LATTICE, {}).get(self.utterance_id)
        return {WITHOUT_LATTICE: f"{found['reason']}: {found['detail']}"} if found else {}

    def _at_step(
        self, manifest: Manifest | None, step: str, task: str, more: Mapping[str, Any] = NO_FACTS
    ) -> Hit | None:
        """Find the utterance in the outputs of `task`, or else anywhere in the step.

        `more` is what is known of it besides the hit's facts.
        """
        if manifest is None:
            self.steps.append(StepTrace(step, "step not finished"))
            return None
        found = in_step(self.store, self.run_uri, manifest, task, self.utterance_id)
        if found and found.is_written:
            return self._add(manifest, "written", found.hit, {**found.hit.facts, **more})
        if found:
            self._add(manifest, "quarantined", found.hit, found.hit.facts)
        elif manifest.unselected.utterances:
            reason = {"why": "beyond bootstrap.max_hours; the network aligns it"}
            self._add(manifest, "not selected", Hit("", 0, {}), reason)
        else:
            # Neither written nor in a ledger: `verify` reports the utterance as lost.
            self.steps.append(StepTrace(step, "lost: run jobs.verify"))
        return None

    def _begun(self, steps: Iterable[str]) -> list[str]:
        """Return the steps before the first one that the run lacks."""
        is_there = self.store.exists
        return list(takewhile(lambda step: is_there(manifest_uri(self.run_uri, step)), steps))

    def _explain_absence(self, selections: Mapping[str, Manifest | None]) -> Mapping[str, Any]:
        """Record why no selection file has the utterance; return the facts of its record."""
        found = self._metadata(selections, None)
        record: Mapping[str, Any] = {}
        for manifest in selections.values():
            if manifest and (hit := self.lookup.in_ledgers(manifest)):
                self._add(manifest, "quarantined", hit, hit.facts)
                return hit.facts
        if found is None:
            return self._left_out_by_ingest(selections)
        subset, utterance = found
        manifest = selections[subset]
        if isinstance(utterance, Utterance):
            record = json.loads(utterance.to_json())
        if manifest is None:
            self.steps.append(StepTrace(selection_step(subset), "step not finished"))
        else:
            reason = {"why": why_unselected(manifest, subset, utterance)}
            self._add(manifest, "not selected", Hit("", 0, {}), reason)
        return record

    def _left_out_by_ingest(self, selections: Mapping[str, Manifest | None]) -> Mapping[str, Any]:
        ingested = self._manifest(INGEST_STEP)
        if ingested and (hit := self.lookup.in_ledgers(ingested)):
            self._add(ingested, "quarantined", hit, hit.facts)
            return hit.facts
        raise UnknownUtteranceError(self._unknown(selections))

    def _metadata(
        self, selections: Mapping[str, Manifest | None], created_at: str | None
    ) -> tuple[str, Utterance | Quarantined] | None:
        for subset, manifest in selections.items():
            uris = self.lookup.metadata_uris(subset, manifest, created_at)
            found = in_metadata(self.store, uris, self.utterance_id)
            if found is not None:
                hit, record = found
                key = hit.key.removeprefix(f"{self.corpus_uri.rstrip('/')}/")
                self.steps.append(
                    StepTrace(f"{METADATA_FOLDER}/{subset}", "read", key, hit.position)
                )
                return subset, record
        return None

    def _unknown(self, selections: Mapping[str, Manifest | None]) -> str:
        nameless = sum(
            manifest.quarantined.utterances for manifest in selections.values() if manifest
        )
        there = [subset for subset, manifest in selections.items() if manifest]
        return (
            f"no utterance {self.utterance_id!r} in the metadata of {self.corpus_uri}, nor in the "
            f"selections of {self.run_uri} ({', '.join(there) or 'none is finished'}); check its "
            f"spelling; {nameless} records are in selection ledgers; those of broken lines "
            "have no id"
        )

    def _models(self) -> dict[str, str]:
        """Find the models that read a partition or a shard of the utterance."""
        seen = {each.step for each in self.steps if each.outcome == "written"}
        models = {}
        for name in self._finished(MODELS_FOLDER):
            inputs = read_manifest(self.store, self.run_uri, model_step(name)).inputs
            trained = [
                step
                for step in inputs
                if step in seen - {DEV_ALIGNMENT_STEP} and folder_of(step) != FEATURES_FOLDER
            ]
            if trained:
                models[name] = f"trained on {', '.join(trained)}"
            # Of development speakers newbob has the loss, and no gradient.
            elif DEV_ALIGNMENT_STEP in seen.intersection(inputs):
                models[name] = f"only its validation loss, on {DEV_ALIGNMENT_STEP}"
            # Features that a model never trained on still enter its global mean and variance.
            elif seen.intersection(inputs):
                models[name] = "only its normalization"
        return models

    def _finished(self, folder: str) -> list[str]:
        """Return the finished steps within a folder of the run, such as its models, by name."""
        base = join_uri(self.run_uri, folder)
        keys = (found.uri.removeprefix(f"{base}/") for found in self.store.list(base))
        parts = (key.split("/") for key in keys)
        return [name for name, *rest in parts if rest == [MANIFEST_FILE]]

    def _manifest(self, step: str) -> Manifest | None:
        if not self.store.exists(manifest_uri(self.run_uri, step)):
            return None
        return read_manifest(self.store, self.run_uri, step)

    def _add(self, manifest: Manifest, outcome: str, hit: Hit, facts: Mapping[str, Any]) -> Hit:
        self.steps.append(
            StepTrace(
                manifest.step,
                outcome,
                hit.key,
                hit.position if hit.key else None,
                {name: value for name, value in facts.items() if name != "utterance_id"},
                sha256(json.dumps(manifest.config, sort_keys=True).encode()),
                manifest.code_version,
            )
        )
        return hit
