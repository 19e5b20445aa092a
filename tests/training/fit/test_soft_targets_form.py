"""A fit trains towards the form of soft targets that it names."""

from dataclasses import replace
from pathlib import Path

from tests.training.fit.small_fits import fit, small_fit, write_run
from training.distributed.simulated_group import simulate_ranks


def test_the_form_reaches_the_loss(tmp_path: Path) -> None:
    """Sub-epochs before the first with soft targets are the same; those with them differ."""
    plain = small_fit(student=True)
    curves = []
    for what in (plain, replace(plain, soft_targets="ghost")):
        folder = tmp_path / what.soft_targets
        write_run(folder)
        ((manifest, _),) = simulate_ranks(1, fit, folder, what)
        curves.append(manifest.statistics["curve"])
        assert ("soft_targets" in manifest.config) == (what.soft_targets == "ghost")
    first = [point["labelled"] for point in curves[0]].index(False)
    assert curves[0][:first] == curves[1][:first]
    losses = [curve[first]["cross_entropy"] for curve in curves]
    assert losses[0] != losses[1]
