"""The report's recipe has the trainers that trained, whatever the evaluation's record says."""

from jobs.report_page.collect import trained_recipe
from jobs.run_table import EVALUATE, TRAIN_BASELINE, TRAIN_STUDENT


def test_a_section_is_as_it_trained() -> None:
    """--trainer is an option of training steps alone."""
    before = {"student": {"trainer": {"name": "bmuf"}}, "baseline": {"trainer": {"name": "gtc"}}}
    after = {**before, "student": {"trainer": {"name": "htm", "block_size": 50}}}
    records = {
        TRAIN_BASELINE: {"recipe": before, "trainers": {}},
        TRAIN_STUDENT: {"recipe": after, "trainers": {"student": "htm"}},
        EVALUATE: {"recipe": before, "trainers": {}},
    }
    assert trained_recipe(records) == after
