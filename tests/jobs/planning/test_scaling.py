"""The cost model's command line: table, recommendation, JSON, calibration, and wrong usage."""

import json
from pathlib import Path

import pytest

from infra.settings import ConfigurationError
from jobs import scaling as job
from jobs.plan import LINE_WIDTH
from jobs.scaling import HOLD_OUT, parse_ranks, read_scaling
from tests.job_programs import RunJob
from tests.training.cost_model.speed_up_fit import V100, WORKLOAD, held_out_rows
from training.cost_model.step_time import CostModel
from training.cost_model.trainer_choice import BY_HOST

REPOSITORY = Path(__file__).parents[3]
TINY = str(REPOSITORY / "tests/whole_path/tiny.toml")


def scaled(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command prints, in this process."""
    job.scale_and_print(job.parser().parse_args(arguments))
    return capsys.readouterr().out


def test_the_table_has_a_row_for_each_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Speed-ups of all trainers, hosts, the settings and what they rest on; within the width."""
    shown = scaled(capsys, "--ranks", "1..128", "--block-size", "50", "--group-size", "8")
    assert max(map(len, shown.splitlines())) <= LINE_WIDTH
    parts = shown.split("\n\n")
    title, recommendation, grounds = parts[0], parts[-2], parts[-1]
    head, *rows = [line.split() for line in parts[1].splitlines()]
    assert head == ["ranks", "hosts", "synchronous", "gtc", "bmuf", "htm"]
    assert [row[:2] for row in rows] == [
        *(["1", "1"], ["2", "1"], ["4", "1"], ["8", "1"]),
        *(["16", "2"], ["32", "4"], ["64", "8"], ["128", "16"]),
    ]
    assert rows[-1][2:] == ["55.1", "14.8", "103.6", "103.3"]
    for fact in ("24,000,000 parameters", "148 ms", "25 Gbps between", "blocks of 50 steps"):
        assert fact in title.replace("\n", " ")
    assert recommendation.startswith(
        "Recommended for 128 ranks of 2,048 frames: htm, group_size = 8"
    )
    assert "On 64 ranks one is: bmuf, block_size = 100" in " ".join(recommendation.split())
    assert "000" in grounds


@pytest.mark.parametrize("gbps", ["1", "25"])
@pytest.mark.parametrize(("ranks", "frames"), [("16,64", "64"), ("8..128", "2048"), ("256", "64")])
def test_all_trainers_stand_with_what_is_known(
    capsys: pytest.CaptureFixture[str], ranks: str, frames: str, gbps: str
) -> None:
    """The fastest first, within the width; the line, the row and JSON recommend the same one."""
    options = ("--ranks", ranks, "--minibatch-frames", frames, "--between-gbps", gbps)
    shown = scaled(capsys, *options)
    assert max(map(len, shown.splitlines())) <= LINE_WIDTH
    candidates, recommendation = shown.split("\n\n")[3:5]
    head, *lines = candidates.splitlines()
    assert head.split() == ["trainer", "block", "speed-up", "simulated", "printed", "unknown"]
    document = json.loads(scaled(capsys, *options, "--json"))
    assert len(lines) == len(document["candidates"])
    marked = [
        each["trainer"]
        for line, each in zip(lines, document["candidates"], strict=True)
        if line.endswith("recommended")
    ]
    found = document["recommended"]
    assert marked == ([found["trainer"]] if found else [])
    assert f": {found['trainer'] if found else 'nothing'}" in recommendation


def test_json_holds_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """One object: workload, calibration, speed-ups by ranks, candidates, the recommended one."""
    document = json.loads(scaled(capsys, "--ranks", "8,32", "--parameters", "48e6", "--json"))
    assert [row["ranks"] for row in document["speed_ups"]] == [8, 32]
    assert document["workload"]["num_parameters"] == 48_000_000
    assert document["computing_seconds"] == pytest.approx(2 * 2048 / 13_793)
    found = document["recommended"]
    assert (found["trainer"], found["settings"]) == ("htm", {"group_size": 8, "block_size": 50})
    assert found["printed"] == {"percent": 0.1, "num_ranks": 32, "frames": 65_536, "source": "000"}
    assert found["simulated"] is None
    assert document["speed_ups"][-1]["htm"] == pytest.approx(found["speed_up"])


def test_options_replace_the_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    """Links, hosts, patterns and speeds that a user gives."""
    options = {
        "ranks-per-host": 4,
        "within-gbps": 100.0,
        "between-gbps": 1.0,
        "connection-gbps": 0.5,
        "all-gather": "ring",
        "all-reduce": "direct",
    }
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    speed = ("--frames-per-second", "1000", "--parameters", "1e6", "--minibatch-frames", "512")
    document = json.loads(scaled(capsys, *arguments, *speed, "--density", "0.01", "--json"))
    network = document["calibration"]["network"]
    assert {name: network[name.replace("-", "_")] for name in options} == options
    assert document["computing_seconds"] == pytest.approx(0.512)
    assert document["workload"]["density"] == 0.01


def test_unequal_groups_have_no_speed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A dash, where the ranks make no groups of that size."""
    shown = scaled(capsys, "--ranks", "8,12,16", "--group-size", "8")
    assert [line.split()[-1] == "-" for line in shown.split("\n\n")[1].splitlines()[1:]] == [
        *(False, True, False)
    ]


def test_calibrate_keeps_what_it_measures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """This machine's rank; the same prediction comes from the file."""
    file = str(tmp_path / "here.json")
    measured = scaled(capsys, "--calibrate", file, "--recipe", TINY, "--between-gbps", "1")
    assert scaled(capsys, "--calibration", file) == measured
    calibration = read_scaling(file)
    assert calibration.rank.num_parameters < 1e6
    assert calibration.network.between_gbps == 1.0
    assert "rank measured on" in calibration.source


def test_the_stated_hold_out_is_the_models() -> None:
    """The figures that the command prints about its own errors."""
    model = CostModel(WORKLOAD, read_scaling("scaling_v100"))
    found = {
        (row.trainer, row.block_size): f"{row.predicted_by(model):.1f}"
        for row in held_out_rows(V100)
    }
    assert f"BMUF {found['bmuf', 50]} (published 101.5)" in HOLD_OUT
    assert f"HTM {found['htm', 50]} (97.8), GTC {found['gtc', None]} (10.9)" in HOLD_OUT
    assert f"BMUF {found['bmuf', 25]} (91.3), HTM {found['htm', 25]} (77.9)" in HOLD_OUT


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1..8", (1, 2, 4, 8)), ("4..24", (4, 8, 16, 24)), ("32,16", (16, 32)), ("7", (7,))],
)
def test_ranks_double_or_are_listed(text: str, expected: tuple[int, ...]) -> None:
    """Ascending, each once."""
    assert parse_ranks(text) == expected


@pytest.mark.parametrize("text", ["", "0..8", "8..4", "a", "1,,2", "1..1e3", "0", "1..100000"])
def test_other_ranks_are_refused(text: str) -> None:
    """The message says what is needed."""
    with pytest.raises(ValueError, match=f"ranks = {text}: need"):
        parse_ranks(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--between-gbps", "0"), "between_gbps = 0.0: need 1e-09"),
        (("--density", "2"), r"density = 2.0: need 0..1"),
        (("--parameters", "0"), "num_parameters = 0: need 1"),
        (("--ranks", "0"), "ranks = 0: need numbers from 1"),
        (("--group-size", "5", "--ranks", "40"), "divisor or a multiple of 8"),
    ],
)
def test_wrong_values_name_the_bound(arguments: tuple[str, ...], message: str) -> None:
    """The value, and what is needed instead."""
    with pytest.raises(ValueError, match=message):
        job.scale_and_print(job.parser().parse_args(arguments))


def test_unknown_keys_of_a_calibration_are_refused(tmp_path: Path) -> None:
    """With the nearest known one."""
    ours = REPOSITORY / "jobs/calibrations/scaling_v100.toml"
    file = tmp_path / "mine.toml"
    file.write_text(ours.read_text().replace("within_gbps", "within_gpbs"))
    with pytest.raises(ConfigurationError, match="did you mean within_gbps"):
        read_scaling(str(file))


def test_exit_codes_and_help(run_job: RunJob) -> None:
    """A file that is not there exits with 2 and one line; --help explains."""
    failed = run_job("scaling", "--calibration", "absent")
    assert failed.code == 2
    assert failed.err.count("\n") == 1
    assert "absent: cannot be read" in failed.err
    shown = job.parser().format_help()
    assert "--measure-link" in shown
    assert max(map(len, shown.splitlines())) <= LINE_WIDTH


@pytest.mark.parametrize("gbps", ["0.02", "0.005"])
def test_no_pair_is_fast_on_a_slow_link(capsys: pytest.CaptureFixture[str], gbps: str) -> None:
    """A model of 96 MB takes 38 s at 20 Mbit/s: an exchange a step is slower than any block."""
    link = ("--between-gbps", gbps, "--connection-gbps", gbps)
    document = json.loads(scaled(capsys, "--ranks", "1..16", *link, "--json"))
    speed_ups = {
        (each["trainer"], each["settings"].get("block_size")): each["speed_up"]
        for each in document["candidates"]
    }
    assert document["recommended"]["trainer"] in {"bmuf", "htm"}
    assert speed_ups["ad_psgd", None] < 0.1 * speed_ups["bmuf", 50]
    assert speed_ups[BY_HOST, 50] > speed_ups["bmuf", 50]


def test_equation_4_says_on_how_many_ranks_exchanges_are_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On a tenth of the link, a tenth of the ranks, where communication is all that counts."""
    text = scaled(capsys, "--ranks", "64", "--between-gbps", "0.1")
    hidden, tenth = (
        json.loads(scaled(capsys, "--ranks", "64", "--between-gbps", gbps, "--json"))[
            "one_bit_ranks"
        ]
        for gbps in ("0.1", "0.01")
    )
    assert hidden == pytest.approx(10 * tenth, rel=0.2)
    said = " ".join(text.split())
    assert f"hides its exchanges on up to {hidden:,.0f} ranks that share a minibatch" in said
