"""A report with every section, as a run of five placements and twelve speakers would give it."""

from typing import Any

PLACEMENTS = ("DP1", "DP2", "DP3", "DP4", "DP5")
MODELS = ("baseline", "teacher", "student")
STEPS = (
    *("ingest", "select_utterances", "extract_features", "bootstrap"),
    *("train_aligner", "realign", "train_baseline"),
    *("train_teacher", "generate_targets", "repartition", "train_student", "evaluate", "certify"),
)
MACHINE = "Xeon 8481C, 16 cores, 126 GiB, 1 x H100"
HOUR_MS = 3_600_000


def estimate(value: float, spread: float) -> dict[str, float]:
    """A value with its interval."""
    return {"value": value, "low": value - spread, "high": value + spread}


def curve(labelled: list[bool], **trainer: float) -> list[dict[str, Any]]:
    """Points of a curve that gets better by the sub-epoch."""
    return [
        {
            "labelled": kind,
            "learning_rate": 2e-3 / (number + 1),
            "num_ranks": 4,
            "num_frames": 120_000,
            "cross_entropy": 1.4 + 2.4 / (number + 1) + 0.3 * kind,
            "frame_accuracy": 0.62 - 0.5 / (number + 1),
            "validation_cross_entropy": 1.6 + 2.2 / (number + 1),
            "validation_frame_accuracy": 0.6 - 0.5 / (number + 1),
            "trainer": {"bytes_sent": 1_500_000, **trainer},
        }
        for number, kind in enumerate(labelled)
    ]


def stage(step: str, in_h: float, unselected_h: float, quarantined_h: float) -> dict[str, Any]:
    """A step's hours, in milliseconds."""
    into, aside, bad = (round(HOUR_MS * hours) for hours in (in_h, unselected_h, quarantined_h))
    return {
        "step": step,
        "in_ms": into,
        "out_ms": into - aside - bad,
        "unselected_ms": aside,
        "quarantined_ms": bad,
        "utterances_out": 4321,
        "utterances_quarantined": 9,
    }


def figures(measured: float) -> dict[str, Any]:
    """A certificate's figures of one kind of minibatch."""
    names = ("effective_files", "effective_speakers", "design_effect", "mean_displacement")
    bounds = {"uniform": 9.0, "uniform_low": 8.5, "uniform_high": 9.75}
    return {name: {"measured": measured, **bounds} for name in names}


def certificate() -> dict[str, Any]:
    """A certificate of chunks: four figures within the uniform range, four above it."""
    form = {"num_samples": 51_200, "num_steps": 64, "step": figures(9.25), "rank": figures(10.5)}
    whole = {"effective_files": 19.6, "effective_speakers": 61.4}
    return {"num_ranks": 4, "uniform_run": whole, "chunks": form}


def kbest_costs() -> dict[str, Any]:
    """Costs of five k, of all frames and of the hardest placement."""
    by_k = {
        str(k): {
            "mass": mass,
            "agreement": mass,
            **{f"calibration_error_{form}": (1 - mass) / 9 for form in ("renormalized", "ghost")},
            **{f"angle_{form}": 60 * (1 - mass) for form in ("renormalized", "ghost", "sampled")},
        }
        for k, mass in ((1, 0.44), (5, 0.8), (10, 0.9), (20, 0.948), (40, 0.98))
    }
    means = {"num_frames": 5000, "k": by_k}
    return {"all": means, "by_placement": {"DP5": means}}


def statistics() -> dict[str, Any]:
    """Intervals and tests, by placement and over all."""
    rates = zip(MODELS, (43.0, 36.6, 37.1), strict=True)
    found = {
        "num_speakers": 12,
        "reference_words": 4065,
        "wer": {model: estimate(rate, 5.5) for model, rate in rates},
        "comparisons": [
            {
                "baseline": "baseline",
                "system": system,
                "reduction": estimate(13.5, 3.4),
                "p_value": 0.0005,
                "share_without_gain": 0.0,
            }
            for system in ("teacher", "student")
        ],
    }
    return {
        "num_resamples": 10_000,
        "seed": 17,
        "level": 95,
        "pooled": found,
        "by_placement": dict.fromkeys(PLACEMENTS, found),
    }


def confidence() -> dict[str, Any]:
    """Confidences of two bins."""
    bins = [
        {"low": 0.4, "num_words": 100, "num_correct": 50, "mean_confidence": 0.45},
        {"low": 0.9, "num_words": 1100, "num_correct": 1000, "mean_confidence": 0.96},
    ]
    return {
        "num_words": 1200,
        "num_correct": 1050,
        "mean_confidence": 0.9175,
        "normalized_cross_entropy": 12.75,
        "bins": bins,
    }


def development(reference_words: int) -> dict[str, Any]:
    """Word errors of development speakers, as tuning left them."""
    counts = {"substitutions": 90, "insertions": 10, "deletions": 28}
    return {model: {**counts, "reference_words": reference_words, "wer": 25.0} for model in MODELS}


def oracle() -> dict[str, Any]:
    """An oracle's rates and what is recovered of its gain, by placement and over all."""
    rates = zip((*MODELS, "oracle"), (43.0, 36.6, 37.1, 24.0), strict=True)
    found = {
        "num_speakers": 12,
        "reference_words": 4065,
        "wer": {model: estimate(rate, 5.5) for model, rate in rates},
        "recovery": {"teacher": estimate(33.7, 8.0), "student": estimate(31.0, 9.0)},
    }
    return {
        "run": "s3://speech/runs/oracle",
        "labelled_hours": {"this": 0.3, "oracle": 4.1},
        "has_same_language_model": False,
        "lacks": "",
        "num_resamples": 10_000,
        "seed": 17,
        "level": 95,
        "pooled": found,
        "by_placement": {**dict.fromkeys(PLACEMENTS, found), "DP1": without_gain(found)},
    }


def without_gain(found: dict[str, Any]) -> dict[str, Any]:
    """The same where the oracle gains nothing: there is no share to recover."""
    return {**found, "recovery": dict.fromkeys(found["recovery"])}


def origin() -> dict[str, Any]:
    """Dates, machine, commit and dollars of every step."""
    step = {
        "finished_at": "2026-11-24T09:30:00+00:00",
        "machine": MACHINE,
        "commit": "8140d000f00d",
        "dollars": 1.25,
    }
    return {
        "finished_at": "2026-11-24T09:30:00+00:00",
        "step_seconds": 7260.0,
        "elapsed_seconds": 9000.0,
        "machines": [MACHINE],
        "commits": ["8140d000f00d"],
        "dollars": 13.75,
        "steps": dict.fromkeys(STEPS, step),
    }


def worst() -> dict[str, Any]:
    """Twenty words with each kind of error."""
    words = ["see", "the", "wasp", "that", "sat", "on", *["my", "lamp", "and", "would", "not"] * 2]
    heard = [*words[:2], "", "hat", *words[4:]]
    pairs = [list(pair) for pair in zip(words, heard, strict=True)] + [["", "be"]]
    utterance = {
        "utterance_id": "speaker-03-0007-" + "x" * 40,
        "speaker_id": "speaker-03",
        "placement": "DP5",
        "word_errors": {
            "substitutions": 1,
            "insertions": 1,
            "deletions": 1,
            "reference_words": len(words),
        },
        "words": pairs,
    }
    return {"model": "student", "utterances": [utterance] * 3}


def whole_report() -> dict[str, Any]:
    """A whole report, the student better everywhere."""
    wer = {
        model: {name: 33.0 + 6 * place - gain for place, name in enumerate(PLACEMENTS)}
        for model, gain in zip(MODELS, (0, 6, 5), strict=True)
    }
    errors = {"substitutions": 310, "insertions": 20, "deletions": 70, "reference_words": 1234}
    step = {"utterances_in": 1000, "utterances_out": 900, "quarantined": 7}
    trainer = {"gradient_threshold": 2.0, "block_size": 20, "group_size": 2, "name": "htm"}
    student = {"minibatch_frames": 512, "trainer": trainer}
    htm = {"density": 0.0125, "residual_norm": 3.5, "block_update_norm": 0.25}
    pair = {"planned": 1_000_000.0, "actual": 1_100_000.0}
    pace = [{"sub_epoch": n, "num_frames": 120_000, "seconds": 40.0 + n} for n in range(8)]
    return {
        "run": "s3://speech/runs/" + "a-long-name-of-a-run-" * 3,
        "code_version": "0.1.0",
        "recipe": {"name": "demo", "selection": {"hours": 4.0}, "student": student},
        "wer": wer,
        "werr": dict(zip(PLACEMENTS, (20.7, 19.3, 18.3, 8.4, 7.5), strict=True)),
        "word_errors": {model: dict.fromkeys(PLACEMENTS, errors) for model in MODELS},
        "statistics": statistics(),
        "out_of_vocabulary": {
            "num_words": 6170,
            "num_unknown": 253,
            "num_types": 900,
            "num_unknown_types": 130,
        },
        "speakers": {
            f"speaker-{n:02d}": {
                "reference_words": 300,
                "errors": {"baseline": 100 + 5 * n, "teacher": 90 + n, "student": 95 + 4 * n},
            }
            for n in range(12)
        },
        "worst": worst(),
        "development": development(512),
        "decoding": {model: {"acoustic_scale": 0.4, "ngram_order": 3} for model in MODELS},
        "frame_accuracy": {model: dict.fromkeys(PLACEMENTS, 61.25) for model in MODELS},
        "confidence": dict.fromkeys(MODELS, confidence()),
        "hours": {"labelled": 0.3, "unlabelled": 3.9, "heldout": 0.7},
        "hours_curve": [
            {
                "run": f"s3://speech/runs/{hours}",
                "hours": hours,
                "wer": {"baseline": estimate(43.0, 5.0), "student": estimate(41.0 - hours, 5.0)},
            }
            for hours in (1.0, 2.0, 3.9)
        ],
        "oracle": oracle(),
        "comparison": {
            "run": "s3://speech/runs/before",
            "wer": wer,
            "hours": {"labelled": 0.3, "unlabelled": 2.0},
            "steps": {"train_student": {"seconds": 50.0, **step}},
            "recipe": {"name": "demo", "selection": {"hours": 2.0}},
            "development": development(510),
            "pairs": [{"model": "student", "reduction": estimate(4.0, 3.0), "p_value": 0.03}],
        },
        "steps": {name: {"seconds": 10.0 * (n + 1), **step} for n, name in enumerate(STEPS)},
        "origin": origin(),
        "plan": {
            "calibrated_on": MACHINE,
            "steps": {"extract_features": dict.fromkeys(("objects", "bytes written"), pair)},
        },
        "curves": {"baseline": curve([True] * 6), "student": curve([False, True] * 4, **htm)},
        "pace": {"student": pace},
        "models": {"student": {"num_parameters": 612_345}},
        "waterfall": {
            "all subsets": [stage("ingest", 6.1, 0, 0.1)],
            "unlabelled": [
                stage("selection/unlabelled", 5.0, 1.0, 0.05),
                stage("features/unlabelled", 3.95, 0, 0.05),
                stage("targets/unlabelled", 3.9, 0, 0),
                stage("partitions/unlabelled", 3.9, 0, 0),
            ],
        },
        "quarantine": {
            "ingest": {"missing_object": 9},
            "features/unlabelled": {"silent": 2, "truncated": 5},
        },
        "retries": [
            {
                "step": "features/unlabelled",
                "reasons": ["silent", "truncated"],
                "command": "megahour retry --recipe demo --run s3://speech/runs/demo --step "
                "features/unlabelled --reason silent,truncated",
            }
        ],
        "device_faults": {
            "generate_targets": [
                {
                    "host": "worker-7",
                    "device": "cuda:3",
                    "kind": "left out",
                    "reason": "no such device",
                    "num_tasks": 12,
                }
            ]
        },
        "targets": {
            "k": 20,
            "offsets": "one",
            "num_teachers": 1,
            "mean_retained_mass": 0.98765,
            "num_frames": 4321,
        },
        "kbest_costs": kbest_costs(),
        "certificate": certificate(),
    }
