"""Select by Spark's DataFrame, its aggregations, sort and shuffle; compare with our passes.

python -m tests.benchmarks.selection_by_spark RECORDS FOLDER (needs pandas, for mapInArrow)

Each bucket is parsed once into rows, which lie on local disk; duplicates and the cutoff come from
aggregations by priority; what is selected is shuffled by group of buckets, sorted into stream order
and packed. Prints wall time and processor time of the process and all its children, and whether
both ways made the same files. Neither indexes ids nor compares subsets here.
"""

import hashlib
import os
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import functions as sql

from infra.cluster import load_cluster
from infra.spark.session import run_tasks, spark_session
from infra.store.object_store import ObjectStore, join_uri
from pipeline.packing import group_buckets, pack_speakers
from pipeline.records import Quarantined
from pipeline.steps.selection import select as selection
from pipeline.steps.selection.buckets import Filtered, RecordRules, digest_buckets, list_metadata
from pipeline.steps.selection.select import SelectionConfig, metadata_uri, select_utterances
from tests.benchmarks.selection import make_metadata

SIGN = 1 << 63  # Spark has no unsigned numbers
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ROWS = pa.schema(
    [
        ("bucket", pa.int32()),
        ("seq", pa.int64()),
        ("priority", pa.int64()),
        ("duration_ms", pa.int64()),
        ("speaker", pa.string()),
        ("created_us", pa.int64()),
        ("utterance_id", pa.string()),
        ("line", pa.binary()),
        ("left_out", pa.string()),
    ]
)
ROWS_SQL = (
    "bucket int, seq long, priority long, duration_ms long, speaker string, created_us long, "
    "utterance_id string, line binary, left_out string"
)
FILES_SQL = "name string, sha256 string, utterances long, duration_ms long"


def tree_seconds():
    """Return the processor time of this process and of all that it has started."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = file.read_text()
        except OSError:
            continue
        rest = text[text.rindex(")") + 2 :].split()
        found[int(text.split()[0])] = int(rest[1]), sum(map(int, rest[11:15]))
    total, todo = 0, [os.getpid()]
    while todo:
        parent = todo.pop()
        total += found[parent][1]
        todo += [each for each, (its, _) in found.items() if its == parent]
    return total / os.sysconf("SC_CLK_TCK")


def parse(store, rules, buckets, batches):
    """Yield the rows of each bucket."""
    for number in (number for batch in batches for number in batch.column(0).to_pylist()):
        rows = []
        for seq, found in enumerate(rules.apply(store, buckets[number])):
            if isinstance(found, Quarantined):
                line = found.to_json().encode()
                rows.append((number, seq, 0, found.duration_ms, "", 0, "", line, "quarantined"))
            elif isinstance(found, Filtered):
                ms = found.record.duration_ms
                rows.append((number, seq, 0, ms, "", 0, "", b"", found.rule))
            else:
                record = found.record
                created = datetime.fromisoformat(record.created_at) - EPOCH
                rows.append(
                    (
                        number,
                        (number << 40) | seq,
                        found.priority - SIGN,
                        record.duration_ms,
                        record.speaker_id,
                        created // timedelta(microseconds=1),
                        record.utterance_id,
                        record.to_json().encode() + b"\n",
                        "",
                    )
                )
        columns = zip(*rows, strict=True)
        arrays = [pa.array(each, kind) for each, kind in zip(columns, ROWS.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=ROWS)


def pack(store, folder, file_hours, batches):
    """Pack the speakers of each group, whose rows are sorted, into files."""
    held = list(batches)
    whole = pa.Table.from_batches(held) if held else pa.table({"group": []})
    for group in sorted(set(whole.column("group").to_pylist())):
        table = whole.filter(pc.equal(whole.column("group"), group))
        lines, durations_ms = defaultdict(list), defaultdict(int)
        names = ("speaker", "duration_ms", "line")
        for speaker, ms, line in zip(*(table.column(n).to_pylist() for n in names), strict=True):
            lines[speaker].append(line)
            durations_ms[speaker] += ms
        for number, speakers in enumerate(pack_speakers(dict(durations_ms), file_hours)):
            data = b"".join(line for speaker in speakers for line in lines[speaker])
            name = f"group-{group:05d}-{number:05d}"
            store.put(f"{folder}/{name}.jsonl", data)
            yield pa.RecordBatch.from_pylist(
                [
                    {
                        "name": name,
                        "sha256": hashlib.sha256(data).hexdigest(),
                        "utterances": sum(len(lines[speaker]) for speaker in speakers),
                        "duration_ms": sum(durations_ms[speaker] for speaker in speakers),
                    }
                ]
            )


def select_by_dataframe(session, store, uri, folder, config, distribute):
    """Return name, digest and counts of each file, and the last priority."""
    buckets = digest_buckets(store, list_metadata(store, uri), distribute, "digest")
    rules = RecordRules(config.seed, config.filters)
    context = session.sparkContext
    numbers = context.parallelize([(n,) for n in range(len(buckets))], len(buckets))
    rows = session.createDataFrame(numbers, "bucket int").mapInArrow(
        partial(parse, store, rules, buckets), ROWS_SQL
    )
    rows = rows.persist(StorageLevel.DISK_ONLY)
    left_out = rows.filter("left_out <> ''").groupBy("left_out")
    left_out.agg(sql.count("*"), sql.sum("duration_ms")).collect()
    eligible = rows.filter("left_out = ''")
    firsts = eligible.groupBy("priority").agg(
        sql.min("seq").alias("first"),
        sql.count("*").alias("n"),
        sql.min_by("duration_ms", "seq").alias("duration_ms"),
    )
    firsts = firsts.persist(StorageLevel.DISK_ONLY)
    speakers = eligible.select("speaker", "bucket").distinct().groupBy("speaker").count()
    assert not speakers.filter("count > 1").count(), "a speaker is in two buckets"
    upper = sql.shiftright("priority", 48).alias("upper")
    ranges = sorted(firsts.groupBy(upper).agg(sql.sum("duration_ms").alias("ms")).collect())
    totals_ms = np.cumsum([each.ms for each in ranges])
    met = int(np.searchsorted(totals_ms, config.budget_ms))
    inside = firsts.filter(sql.shiftright("priority", 48) == ranges[met].upper)
    inside = sorted(inside.select("priority", "duration_ms").collect())
    within_ms = totals_ms[met] - ranges[met].ms + np.cumsum([ms for _, ms in inside])
    last = inside[int(np.searchsorted(within_ms, config.budget_ms))][0]
    repeated = sql.broadcast(firsts.filter("n > 1").select("priority", "first"))
    chosen = eligible.filter(sql.col("priority") <= last).join(repeated, "priority", "left")
    chosen = chosen.filter("first is null or first = seq")
    by_bucket = chosen.groupBy("bucket").agg(sql.sum("duration_ms").alias("ms")).collect()
    durations_ms = dict.fromkeys(range(len(buckets)), 0) | {it.bucket: it.ms for it in by_bucket}
    groups = group_buckets(list(durations_ms.values()), config.file_hours)
    pairs = [(bucket, group) for group, some in enumerate(groups) for bucket in some]
    placed = chosen.join(
        sql.broadcast(session.createDataFrame(pairs, "bucket int, group int")), "bucket"
    )
    order = ("group", "bucket", "speaker", "created_us", "utterance_id")
    placed = placed.select(*order, "duration_ms", "line").repartition(len(groups), "group")
    packed = placed.sortWithinPartitions(*order).mapInArrow(
        partial(pack, store, folder, config.file_hours), FILES_SQL
    )
    return sorted(tuple(each) for each in packed.collect()), last + SIGN


def main(num_records, folder):
    """Make metadata, select a tenth of the hours in both ways, print."""
    uri = metadata_uri(join_uri(folder, "corpus"), "unlabelled")
    hours = make_metadata(uri, num_records, compressed=False)
    config = SelectionConfig(hours=0.1 * hours, file_hours=5.0, seed=7)
    store = ObjectStore((folder,))
    selection.index_ids = lambda *_: ()
    selection.require_disjoint = lambda *_, **__: None
    with spark_session("selection by Spark", load_cluster("demo")) as session:
        distribute = partial(run_tasks, session)
        distribute(range(2), abs, "start the workers")
        begun, used = time.perf_counter(), tree_seconds()
        made = select_utterances(
            store, join_uri(folder, "run"), "unlabelled", uri, config, 0.0, distribute
        ).manifest
        wall, cpu = time.perf_counter() - begun, tree_seconds() - used
        print(f"passes: {wall:.0f} s, {cpu:.0f} s of CPU", flush=True)
        begun, used = time.perf_counter(), tree_seconds()
        files, last = select_by_dataframe(
            session, store, uri, join_uri(folder, "out"), config, distribute
        )
        wall, cpu = time.perf_counter() - begun, tree_seconds() - used
        print(f"DataFrame: {wall:.0f} s, {cpu:.0f} s of CPU")
    names = [each.key.rpartition("/")[2].rpartition("-")[0] for each in made.outputs]
    ours = sorted(
        (name, each.sha256, each.utterances, each.duration_ms)
        for name, each in zip(names, made.outputs, strict=True)
    )
    print(f"same: {ours == files and last == made.statistics['last_priority']}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
