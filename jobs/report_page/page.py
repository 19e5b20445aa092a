"""Render the report as one self-contained HTML page: layout.html over what report.json holds.

Here are the values that the layout cannot state as an expression over the report.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any, Literal

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from jobs.report_page import figures, wording
from jobs.report_page.wording import Report, in_order, printable, with_all_parts
from pipeline.runs.names import BASELINE, STUDENT, section_of
from pipeline.shuffle_quality import FIGURE_TITLES, NUM_ORDERS

PAPER_WERR = {"DP1": 9.8, "DP2": 22.2, "DP3": 21.8, "DP4": 16.5, "DP5": 18.9}
"""Paper 003 Table II: relative word error rate reduction, percent, by device placement."""

LEAST_MASS = 0.95
"""A retained mass below this is worth a warning: a twentieth of the probability is not stored."""

MS_PER_HOUR = 3_600_000

_FILES = resources.files("jobs.report_page")

Stage = Mapping[str, Any]
"""A step's milliseconds in, out, not selected and quarantined, as collect.stage_of made it."""


def render_report(report: Report) -> str:
    """Render a self-contained HTML page, also well-formed XML; the same report gives the same text.

    Empty and missing parts of the report are left out; all its texts are escaped.
    """
    report = with_all_parts(report)
    return _layout().render(
        report=report,
        comparison=with_all_parts(report["comparison"]),
        # The style is ours; an escaped one would have no > and no quotes.
        style=Markup(_FILES.joinpath("style.css").read_text("utf-8")),  # noqa: S704
        recipe=json.dumps(report["recipe"], indent=2, ensure_ascii=False).split("\n"),
        shuffle=list(shuffle_figures(report["certificate"])),
        num_orders=NUM_ORDERS,
        paper_werr=PAPER_WERR,
        least_mass=LEAST_MASS,
        low_masses=low_masses(report),
        amounts=list(amounts(report)),
        changed_settings=changed_settings(report),
        figures=figures,
    )


@cache
def _layout() -> Template:
    environment = Environment(
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {each.__name__: each for each in FILTERS}
    return environment.from_string(_FILES.joinpath("layout.html").read_text("utf-8"))


def _printable(value: object) -> object:
    """Make a value of the template printable; what is markup already has no text of others."""
    return value if isinstance(value, Markup) else printable(str(value))


def counted(count: int, noun: str) -> str:
    """Write a number of things, as in "1 word" and "2 words"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def run_name(uri: str) -> str:
    """Return the last part of a run's URI."""
    return uri.rstrip("/").rpartition("/")[2]


def hours(milliseconds: float) -> float:
    """Convert milliseconds to hours."""
    return milliseconds / MS_PER_HOUR


def evaluated_models(found: Mapping[str, Any]) -> list[str]:
    """Return the models of statistics, in order."""
    return in_order(found["wer"])


def bins_of_models(confidence: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Return each model's bins of confidence, the models in order."""
    return {model: confidence[model]["bins"] for model in in_order(confidence)}


def by_count(counts: Mapping[str, int]) -> list[str]:
    """Return names by falling count."""
    return sorted(counts, key=lambda name: -counts[name])


def by_k(costs: Mapping[str, Any]) -> list[str]:
    """Return the numbers of columns kept, rising."""
    return sorted(costs, key=int)


def date(text: str) -> str:
    """Write a record's ISO 8601 time in UTC."""
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def duration(seconds: float) -> str:
    """Write seconds as such, in minutes or in hours."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def speaker_rates(report: Report) -> dict[str, dict[str, float]]:
    """Return word error rates in percent by speaker and model, the student's worst first.

    Speakers without a reference word have no rate.
    """
    rates = {
        name: {model: 100 * each / words for model, each in counts["errors"].items()}
        for name, counts in report["speakers"].items()
        if (words := counts["reference_words"])
    }
    worst = sorted(rates, key=lambda name: (-rates[name].get(STUDENT, 0.0), name))
    return {name: rates[name] for name in worst}


def baseline_and_student(
    rates: Mapping[str, Mapping[str, float]],
) -> list[tuple[str, float, float]]:
    """Return the rates of baseline and student of each speaker who has both."""
    return [
        (name, each[BASELINE], each[STUDENT])
        for name, each in rates.items()
        if each.keys() >= {BASELINE, STUDENT}
    ]


def better_and_worse(points: Sequence[tuple[str, float, float]]) -> tuple[int, int]:
    """Count the speakers for whom the student makes fewer and more errors than the baseline."""
    changes = [student - baseline for _, baseline, student in points]
    return sum(each < 0 for each in changes), sum(each > 0 for each in changes)


def waterfall_bars(stages: Sequence[Stage]) -> Iterator[tuple[str, float, float]]:
    """Yield the hours before and after each stage, by name; a total begins at 0."""
    yield "metadata", 0.0, hours(stages[0]["in_ms"])
    for stage in stages:
        at = stage["in_ms"]
        for name, key in (("not selected", "unselected_ms"), ("quarantined", "quarantined_ms")):
            if stage[key]:
                yield name, hours(at), hours(at - stage[key])
                at -= stage[key]
        yield stage["step"].partition("/")[0], 0.0, hours(stage["out_ms"])


def unaccounted_ms(stage: Stage) -> int:
    """Return the milliseconds of a stage's input that its manifest accounts for nowhere."""
    kept = stage["out_ms"] + stage["unselected_ms"] + stage["quarantined_ms"]
    return abs(int(stage["in_ms"]) - int(kept))


def lost_ms(stages: Sequence[Stage]) -> int:
    """Add up what each step loses, and what differs between a step and the next one."""
    between = (abs(int(one["out_ms"]) - int(other["in_ms"])) for one, other in pairwise(stages))
    return sum(map(unaccounted_ms, stages)) + sum(between)


def frames_in_block(report: Report, name: str) -> int:
    """Return about how many frames all ranks read in a block; 0 for a trainer without blocks."""
    trained = "sequence_training" if name.endswith("_smbr") else section_of(name)
    settings = report["recipe"].get(trained) or {}
    block_size = (settings.get("trainer") or {}).get("block_size", 0)
    ranks: int = report["curves"][name][-1].get("num_ranks", 1)
    return int(block_size * settings.get("minibatch_frames", 0) * ranks)


def low_masses(report: Report) -> dict[str, float]:
    """Return the retained masses below LEAST_MASS at the recipe's k, by placement."""
    k = str(report["targets"].get("k"))
    found = report["kbest_costs"].get("by_placement", {})
    masses = {name: means["k"][k]["mass"] for name, means in found.items() if k in means["k"]}
    return {name: mass for name, mass in masses.items() if mass < LEAST_MASS}


def shuffle_figures(certificate: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each form's steps and ranks, each with its group and title.

    `outside` says which way it leaves the range of uniform orders: mixed worse or better, or "".
    """
    for form in ("chunks", "whole_utterances"):
        for minibatch in ("step", "rank"):
            found = certificate.get(form, {}).get(minibatch, {})
            group = f"{form.replace('_', ' ')}, minibatches of a {minibatch}"
            for name, title in FIGURE_TITLES.items():
                if figure := found.get(name):
                    side = outside(name, figure)
                    yield {"group": group, "title": title, "figure": figure, "outside": side}


def outside(name: str, figure: Mapping[str, float | None]) -> Literal["", "worse", "better"]:
    """Say whether a figure leaves the range of uniform orders, as less or as better mixed."""
    measured, low, high = (figure[key] for key in ("measured", "uniform_low", "uniform_high"))
    if measured is None:
        return ""
    is_low, is_high = low is not None and measured < low, high is not None and measured > high
    if not (is_low or is_high):
        return ""
    # These fall where an order is less mixed; the others rise.
    falls = name.startswith("effective") or name.endswith("displacement")
    return "better" if is_high == falls else "worse"


def development_words(report: Report) -> int:
    """Return the number of reference words of the development speakers; 0 without any."""
    counts = report["development"].values()
    return max((each["reference_words"] for each in counts), default=0)


def amounts(report: Report) -> Iterator[tuple[str, float | None, float | None]]:
    """Yield the hours of each subset, then the seconds of each step: name, there, here."""
    other = with_all_parts(report["comparison"])
    there, here = other["hours"], report["hours"]
    for name in {**here, **there}:
        yield f"hours, {name}", there.get(name), here.get(name)
    there, here = (
        {name: step["seconds"] for name, step in each["steps"].items()} for each in (other, report)
    )
    for name in {**here, **there}:
        yield f"seconds, {name}", there.get(name), here.get(name)


def changed_settings(report: Report) -> list[tuple[str, str, str]]:
    """Return the settings that differ from the compared run's: name, there, here."""
    here, there = (_flat(each.get("recipe") or {}) for each in (report, report["comparison"]))
    if not there:
        return []
    return [
        (name, there.get(name, "absent"), here.get(name, "absent"))
        for name in sorted(here.keys() | there)
        if here.get(name) != there.get(name)
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value)
    return found


FILTERS = (
    *(baseline_and_student, better_and_worse, bins_of_models, by_count, by_k, counted, date),
    *(development_words, duration, evaluated_models, frames_in_block, hours, in_order, lost_ms),
    *(run_name, speaker_rates, unaccounted_ms, waterfall_bars),
    *(wording.by_placement, wording.certainty, wording.development_rates, wording.gain_on_baseline),
    *(wording.headline, wording.interval, wording.mean, wording.models_and_oracle, wording.number),
    *(wording.probability, wording.recovery_statement, wording.reductions, wording.scopes),
    wording.unknown_words,
)
"""The functions that the layout applies to parts of the report."""
