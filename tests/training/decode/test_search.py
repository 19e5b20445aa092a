"""The C search against all paths of small graphs, and a plain Viterbi search of larger ones."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from training.decode import search as search_module
from training.decode.const_fst import ARC, ConstFst
from training.decode.search import Search, SearchableGraph, TooManyArcsError

NUM_SENONES = 4
NO_BEAM = 1e9
ALL = 2**31 - 1
seeds = st.integers(0, 2**32 - 1)


def random_graph(
    rng: np.random.Generator, num_states: int, num_arcs: int, has_cycles: bool = False
) -> ConstFst:
    """Draw a graph whose arcs without a frame lead to larger states, or else cost something."""
    sources = rng.integers(0, num_states, num_arcs).astype(np.int32)
    arcs = np.zeros(num_arcs, ARC)
    arcs["input_label"] = rng.integers(0, NUM_SENONES + 1, num_arcs)
    arcs["output_label"] = rng.integers(0, 4, num_arcs)
    arcs["cost"] = rng.normal(1, 2, num_arcs)
    arcs["target"] = rng.integers(0, num_states, num_arcs)
    epsilons = arcs["input_label"] == 0
    if has_cycles:
        arcs["cost"][epsilons] = np.abs(arcs["cost"][epsilons]) + 0.1
    else:
        arcs["input_label"][epsilons & (arcs["target"] <= sources)] = 1
    finals = np.where(rng.random(num_states) < 0.5, rng.normal(size=num_states), np.inf)
    return ConstFst.of(sources, arcs, finals.astype(np.float32), 0)


def random_scores(rng: np.random.Generator, num_frames: int) -> np.ndarray:
    return rng.normal(0, 2, (num_frames, NUM_SENONES)).astype(np.float32)


def searchable(fst: ConstFst) -> SearchableGraph:
    return SearchableGraph(fst, NUM_SENONES, 4)


@dataclass(frozen=True, order=True)
class GraphPath:
    """GraphPath: its cost with scores and end, and the labels and words of all its arcs."""

    cost: float
    arcs: tuple[tuple[int, int], ...]


def all_paths(fst: ConstFst, scores: np.ndarray) -> Iterator[GraphPath]:
    """Yield the paths that end in final states and enter no state twice without a frame."""
    todo = [(fst.start, 0, 0.0, (), (fst.start,))]
    while todo:
        state, frame, cost, read, entered = todo.pop()
        first, number = (int(fst.states[state][name]) for name in ("first_arc", "num_arcs"))
        final = float(fst.states[state]["final_cost"])
        if frame == len(scores) and np.isfinite(final):
            yield GraphPath(cost + final, read)
        for label, word, arc_cost, target in fst.arcs[first : first + number].tolist():
            if label and frame < len(scores):
                total = cost + arc_cost - float(scores[frame, label - 1])
                todo.append((target, frame + 1, total, (*read, (label, word)), (target,)))
            elif not label and target not in entered:
                more = (*read, (0, word)), (*entered, target)
                todo.append((target, frame, cost + arc_cost, *more))


def lattice_paths(arcs: np.ndarray) -> Iterator[tuple[GraphPath, frozenset[int]]]:
    """Yield the paths of a lattice, without their last arc, and the arcs' numbers."""
    end = arcs["target"].max(initial=0)
    todo = [(0, 0.0, (), frozenset[int]())]
    while todo:
        state, cost, read, numbers = todo.pop()
        if state == end and numbers:
            yield GraphPath(cost, read[:-1]), numbers
        for number in np.flatnonzero(arcs["source"] == state):
            _, target, label, word, graph_cost, acoustic_cost = arcs[number].tolist()
            total = cost + graph_cost + acoustic_cost
            todo.append((target, total, (*read, (label, word)), numbers | {number}))


@settings(deadline=None, max_examples=150)
@given(seeds)
def test_best_path_is_the_best_of_all(seed: int) -> None:
    """Also where cycles of arcs read no frame; without a final state the best unfinished one."""
    rng = np.random.default_rng(seed)
    fst = random_graph(rng, int(rng.integers(1, 6)), int(rng.integers(1, 14)), has_cycles=True)
    scores = random_scores(rng, int(rng.integers(1, 4)))
    search = Search(searchable(fst), NO_BEAM, ALL)
    search.advance(scores)
    for ends_sentence in (True, False):
        whole = fst
        if not ends_sentence or not list(all_paths(fst, scores)):
            assert not ends_sentence or not search.has_complete_path
            states = fst.states.copy()
            states["final_cost"] = 0
            whole = replace(fst, states=states)
        expected = min(all_paths(whole, scores), default=None)
        found = search.best_path(ends_sentence)
        if expected is None:
            assert found is None
        else:
            assert found is not None
            pairs = fst.arcs[found][["input_label", "output_label"]].tolist()
            assert tuple(pairs) == expected.arcs


@settings(deadline=None, max_examples=150)
@given(seeds)
def test_lattice_has_exactly_the_paths_within_its_beam(seed: int) -> None:
    """Each arc is on one of them, with its costs; states have topological numbers."""
    rng = np.random.default_rng(seed)
    fst = random_graph(rng, int(rng.integers(1, 6)), int(rng.integers(1, 14)))
    scores = random_scores(rng, int(rng.integers(1, 4)))
    beam = float(rng.choice([1e-3, 2, 8, 1e6]))
    search = Search(searchable(fst), NO_BEAM, ALL, beam)
    search.advance(scores)
    is_complete = search.has_complete_path
    arcs = search.end_lattice()
    expected = sorted(all_paths(fst, scores))
    assert is_complete == bool(expected)
    if not is_complete:
        return
    limit = expected[0].cost + beam
    assume(all(abs(path.cost - limit) > 1e-3 for path in expected))  # float32 costs are rounded
    within = [path for path in expected if path.cost <= limit]
    found = list(lattice_paths(arcs))
    kept = sorted(path for path, _ in found if path.cost <= limit)
    assert [path.arcs for path in kept] == [path.arcs for path in within]
    np.testing.assert_allclose(
        [path.cost for path in kept], [path.cost for path in within], atol=1e-4
    )
    on_them = [numbers for path, numbers in found if path.cost <= limit]
    assert frozenset().union(*on_them) == set(range(len(arcs)))
    assert (arcs["source"] < arcs["target"]).all()
    assert {*arcs["source"]} | {*arcs["target"]} == set(range(arcs["target"].max() + 1))


def viterbi(fst: ConstFst, scores: np.ndarray) -> float:
    """Return the cost of the best complete path by steps over all arcs."""
    costs = np.full(len(fst.states), np.inf)
    costs[fst.start] = 0
    sources, label, target = fst.sources, fst.arcs["input_label"], fst.arcs["target"]
    for frame in range(len(scores) + 1):
        if frame:
            reads, before = label > 0, costs
            new = before[sources[reads]] + fst.arcs["cost"][reads]
            costs = np.full_like(before, np.inf)
            np.minimum.at(costs, target[reads], new - scores[frame - 1, label[reads] - 1])
        for _ in costs:
            epsilons = label == 0
            new = costs[sources[epsilons]] + fst.arcs["cost"][epsilons]
            np.minimum.at(costs, target[epsilons], new)
    return float((costs + fst.states["final_cost"]).min())


def cost_of(fst: ConstFst, scores: np.ndarray, path: np.ndarray) -> float:
    arcs = fst.arcs[path]
    labels = arcs["input_label"]
    assert arcs["target"].tolist()[:-1] == fst.sources[path].tolist()[1:]
    acoustic = scores[np.arange(len(scores)), labels[labels > 0] - 1].sum(dtype=np.float64)
    final = fst.states["final_cost"][arcs["target"][-1]]
    return float(arcs["cost"].sum(dtype=np.float64) - acoustic + final)


@settings(deadline=None, max_examples=20)
@given(seeds)
def test_best_path_costs_what_viterbi_says(seed: int) -> None:
    """Of long utterances, with a lattice or without, whose own best path is the same."""
    rng = np.random.default_rng(seed)
    fst = random_graph(rng, 40, 200)
    scores = random_scores(rng, 120)
    expected = viterbi(fst, scores)
    for lattice_beam in (None, 3.0):
        search = Search(searchable(fst), NO_BEAM, ALL, lattice_beam)
        search.advance(scores)
        path = search.best_path(ends_sentence=True)
        assert search.has_complete_path == np.isfinite(expected)
        if path is not None and np.isfinite(expected):
            assert cost_of(fst, scores, path) == pytest.approx(expected, rel=1e-6)
    arcs = search.end_lattice()
    if np.isfinite(expected):
        best = np.full(arcs["target"].max() + 1, np.inf)
        best[0] = 0
        for arc in arcs:
            cost = best[arc["source"]] + float(arc["graph_cost"]) + float(arc["acoustic_cost"])
            best[arc["target"]] = min(best[arc["target"]], cost)
        assert best[-1] == pytest.approx(expected, rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(seeds)
def test_pieces_give_the_paths_of_the_whole(seed: int) -> None:
    """Best paths and lattices are equal to the last bit, whatever the pieces and the beams."""
    rng = np.random.default_rng(seed)
    fst = random_graph(rng, 60, 300)
    scores = random_scores(rng, 90)
    beams = float(rng.uniform(1, 10)), int(rng.integers(2, 40))
    whole = Search(searchable(fst), *beams, 4.0)
    whole.advance(scores)
    pieces = Search(searchable(fst), *beams, 4.0)
    for piece in np.split(scores, np.sort(rng.integers(0, 91, 5))):
        pieces.advance(piece)
    plain = Search(searchable(fst), *beams)
    plain.advance(scores)
    for ends_sentence in (False, True):
        paths = [each.best_path(ends_sentence) for each in (whole, pieces, plain)]
        assert all(np.array_equal(paths[0], path) for path in paths)
    assert whole.end_lattice().tobytes() == pieces.end_lattice().tobytes()


def pruned(arcs: np.ndarray, beam: float) -> np.ndarray:
    """Return the arcs on paths within a beam, by forward and backward costs."""
    costs = arcs["graph_cost"].astype(np.float64) + arcs["acoustic_cost"]
    num_states = arcs["target"].max() + 1
    forward, backward = np.full((2, num_states), np.inf)
    forward[0] = backward[-1] = 0
    for source, target, cost in zip(arcs["source"], arcs["target"], costs, strict=True):
        forward[target] = min(forward[target], forward[source] + cost)
    order = np.argsort(-arcs["target"], kind="stable")
    for source, target, cost in zip(
        arcs["source"][order], arcs["target"][order], costs[order], strict=True
    ):
        backward[source] = min(backward[source], cost + backward[target])
    through = forward[arcs["source"]] + costs + backward[arcs["target"]]
    return arcs[through <= forward[-1] + beam]


@settings(deadline=None, max_examples=30)
@given(seeds)
def test_pruning_as_it_goes_loses_nothing(seed: int) -> None:
    """Of many frames, the arcs are those of a search that keeps all, pruned at its end."""
    rng = np.random.default_rng(seed)
    fst = random_graph(rng, 12, 60)
    scores = random_scores(rng, int(rng.integers(20, 130)))
    beam = float(rng.uniform(0, 8))
    kept = []
    for lattice_beam in (beam, NO_BEAM):
        search = Search(searchable(fst), NO_BEAM, ALL, lattice_beam)
        search.advance(scores)
        kept.append(search.end_lattice())
    if not len(kept[1]):
        return
    columns = ["label", "word", "graph_cost", "acoustic_cost"]
    found, expected = (np.sort(arcs[columns]) for arcs in (kept[0], pruned(kept[1], beam)))
    np.testing.assert_array_equal(found, expected)


def test_equal_costs_have_one_order() -> None:
    """Of paths with one cost, that with the lowest state and then the first arc is taken."""
    labels = np.array([(1, 1, 0, 1), (1, 2, 0, 2), (1, 3, 0, 1)], ARC)
    fst = ConstFst.of(np.zeros(3, np.int32), labels, np.zeros(3, np.float32), 0)
    for _ in range(3):
        search = Search(searchable(fst), 1.0, ALL)
        search.advance(np.zeros((1, NUM_SENONES), np.float32))
        path = search.best_path(ends_sentence=True)
        assert path is not None
        assert fst.arcs[path]["output_label"].tolist() == [1]


def star(num_arms: int) -> ConstFst:
    """Make a graph whose start leads to as many states, which remain; costs rise with the state."""
    sources = np.concatenate([np.zeros(num_arms), np.arange(1, num_arms + 1)]).astype(np.int32)
    arcs = np.zeros(2 * num_arms, ARC)
    arcs["input_label"] = 1
    arcs["output_label"][:num_arms] = 1
    arcs["cost"][:num_arms] = np.arange(num_arms) / num_arms
    arcs["target"] = np.tile(np.arange(1, num_arms + 1), 2)
    return ConstFst.of(sources, arcs, np.zeros(num_arms + 1, np.float32), 0)


@pytest.mark.parametrize("max_active", [2, 10, 99])
def test_only_max_active_states_go_on(max_active: int) -> None:
    """A lattice of two frames has so many paths, also where all states cost the same."""
    for scale in (1, 0):
        fst = star(100)
        fst.arcs["cost"] *= scale
        search = Search(searchable(fst), NO_BEAM, max_active, NO_BEAM)
        search.advance(np.zeros((2, NUM_SENONES), np.float32))
        arcs = search.end_lattice()
        last = arcs[arcs["target"] == arcs["target"].max()]
        assert len(last) == max_active
        assert len(arcs) == 3 * max_active


def test_a_beam_bounds_what_goes_on() -> None:
    """States farther from the best than the beam are left."""
    search = Search(searchable(star(100)), 0.495, ALL, NO_BEAM)
    search.advance(np.zeros((2, NUM_SENONES), np.float32))
    arcs = search.end_lattice()
    assert np.count_nonzero(arcs["target"] == arcs["target"].max()) == 50


def test_too_few_frames_leave_an_unfinished_path() -> None:
    """A chain of three arcs in two frames has a path, of which none is complete."""
    arcs = np.array([(1, 1, 0, 1), (2, 2, 0, 2), (3, 3, 0, 3)], ARC)
    finals = np.array([np.inf, np.inf, np.inf, 0], np.float32)
    search = Search(searchable(ConstFst.of(np.arange(3, dtype=np.int32), arcs, finals, 0)), 9.0, 9)
    search.advance(np.zeros((2, NUM_SENONES), np.float32))
    assert not search.has_complete_path
    assert search.best_path(ends_sentence=True).tolist() == [0, 1]
    search.advance(np.zeros((1, NUM_SENONES), np.float32))
    assert search.has_complete_path
    search.advance(np.zeros((1, NUM_SENONES), np.float32))
    assert search.best_path(ends_sentence=True) is None


@pytest.mark.parametrize("num_frames", [1, 2, 3, 30, 60])
def test_search_without_any_path_has_an_empty_lattice(num_frames: int) -> None:
    """However long ago the last path broke off."""
    arcs = np.array([(1, 1, 0, 1), (0, 2, 0, 2), (1, 3, 0, 2)], ARC)
    sources = np.array([0, 1, 1], np.int32)
    search = Search(searchable(ConstFst.of(sources, arcs, np.zeros(3, np.float32), 0)), 9.0, 9, 5.0)
    search.advance(np.zeros((2, NUM_SENONES), np.float32))
    search.advance(np.zeros((num_frames, NUM_SENONES), np.float32))
    assert search.best_path(ends_sentence=False) is None
    assert len(search.end_lattice()) == 0


@pytest.mark.parametrize(
    ("arcs", "finals", "start", "wrong"),
    [
        ([(1, 0, 0, 0)], [0], 1, "no such start"),
        ([(1, 0, 0, 2)], [0, 0], 0, "an arc to a state beyond"),
        ([(1, 0, 0, -1)], [0, 0], 0, "an arc to a state beyond"),
        ([(NUM_SENONES + 1, 0, 0, 0)], [0], 0, "an input label beyond the senones"),
        ([(-1, 0, 0, 0)], [0], 0, "an input label beyond the senones"),
        ([(1, 4, 0, 0)], [0], 0, "an output label beyond the words"),
        ([(1, 0, np.nan, 0)], [0], 0, "a cost that is not finite"),
        ([(1, 0, 0, 0)], [np.nan], 0, "a cost that is not finite"),
        ([(0, 0, -1, 0)], [0], 0, "one of them with a negative cost"),
    ],
)
def test_graphs_that_lead_astray_are_refused(
    arcs: list[tuple[float, ...]], finals: list[float], start: int, wrong: str
) -> None:
    """Before any search; the state is named."""
    fst = ConstFst.of(
        np.zeros(len(arcs), np.int32), np.array(arcs, ARC), np.array(finals, np.float32), start
    )
    with pytest.raises(ValueError, match=f"graph: state {start}: .*{wrong}.*build the graph"):
        searchable(fst)


def test_states_with_foreign_arcs_are_refused() -> None:
    """Arcs beyond the end, and those that are not sorted."""
    fst = star(3)
    for name, value, wrong in (
        ("num_arcs", 2**32 - 1, "arcs beyond"),
        ("first_arc", 4, "arcs beyond"),
        ("num_input_epsilons", 1, "not in order"),
    ):
        states = fst.states.copy()
        states[name][0] = value
        with pytest.raises(ValueError, match=f"state 0: .*{wrong}"):
            searchable(replace(fst, states=states))


def test_states_that_share_arcs_are_refused() -> None:
    """Their arcs could be counted beyond what a number holds."""
    arcs = np.array([(1, 0, 0, 1), (1, 0, 0, 1)], ARC)
    fst = ConstFst.of(np.arange(2, dtype=np.int32), arcs, np.zeros(2, np.float32), 0)
    states = fst.states.copy()
    states["first_arc"][1] = 0
    with pytest.raises(ValueError, match=r"state 1: .*arcs beyond"):
        searchable(replace(fst, states=states))


def test_a_search_ends_once_and_with_a_lattice_alone() -> None:
    """Otherwise it would write behind its memory."""
    scores = np.zeros((2, NUM_SENONES), np.float32)
    with_lattice, without = (
        Search(searchable(star(3)), 9.0, 9, 5.0),
        Search(searchable(star(3)), 9.0, 9),
    )
    for search in (with_lattice, without):
        search.advance(scores)
    with_lattice.end_lattice()
    for refused in (with_lattice.end_lattice, without.end_lattice):
        with pytest.raises(ValueError, match="begin another with a lattice_beam"):
            refused()
    with pytest.raises(ValueError, match="the search has ended"):
        with_lattice.advance(scores)


def test_lattice_without_end_of_epsilons_is_refused() -> None:
    """A cycle that reads no frame costs something: the best path is found, no lattice has all."""
    arcs = np.array([(1, 1, 0, 1), (0, 0, 0.5, 0)], ARC)
    fst = ConstFst.of(np.array([0, 1], np.int32), arcs, np.zeros(2, np.float32), 0)
    for lattice_beam in (None, 5.0):
        search = Search(searchable(fst), 9.0, 9, lattice_beam)
        search.advance(np.zeros((2, NUM_SENONES), np.float32))
        assert search.best_path(ends_sentence=True) is not None
    loops = np.array([(1, 1, 0, 0), (0, 0, 0.5, 0)], ARC)
    endless = ConstFst.of(np.zeros(2, np.int32), loops, np.zeros(1, np.float32), 0)
    plain = Search(searchable(endless), 9.0, 9)
    plain.advance(np.zeros((2, NUM_SENONES), np.float32))
    assert plain.best_path(ends_sentence=True).tolist() == [1, 1]
    with pytest.raises(ValueError, match="a cycle of arcs that read no frame"):
        Search(searchable(endless), 9.0, 9, 5.0).advance(np.zeros((1, NUM_SENONES), np.float32))


def test_lattice_that_takes_too_much_memory_has_a_narrower_beam(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the lattice of that beam. Paths that all may still be the best cannot go."""
    wheel, scores = star(100), np.zeros((200, NUM_SENONES), np.float32)
    # All arms lead back: a hundred arcs a frame are made, and five are within a beam of .045.
    wheel.arcs["target"][100:] = 0
    monkeypatch.setattr(search_module, "MAX_LATTICE_ARCS", 26 * 100 + 200 * 5)
    long = Search(searchable(wheel), NO_BEAM, ALL, 0.045)
    long.advance(scores)
    within = long.end_lattice()
    assert len(within) == 5 * 200 + 1
    wide = Search(searchable(wheel), NO_BEAM, ALL, 0.36)
    wide.advance(scores)
    assert np.array_equal(wide.end_lattice(), within)
    monkeypatch.setattr(search_module, "MAX_LATTICE_ARCS", 350)
    search = Search(searchable(star(100)), NO_BEAM, ALL, 0.1)
    search.advance(np.zeros((3, NUM_SENONES), np.float32))
    for _ in range(2):  # a search that has failed remains so
        with pytest.raises(TooManyArcsError, match="more than 350 arcs: lower max_active"):
            search.advance(np.zeros((1, NUM_SENONES), np.float32))


def test_memory_of_a_long_search_is_bounded() -> None:
    """What no path needs any more goes: of a fifty times longer one the path alone remains."""
    rng = np.random.default_rng(1)
    graph = searchable(random_graph(rng, 60, 300))
    scores = random_scores(rng, 2000)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096

    search = Search(graph, 20.0, 40, None)
    search.advance(scores)
    before = resident()
    for _ in range(50):
        search.advance(scores)
    assert resident() - before < 5e6
    path = search.best_path(ends_sentence=False)
    assert np.count_nonzero(graph.fst.arcs[path]["input_label"]) == 51 * 2000


def slow_search() -> tuple[Search, np.ndarray]:
    rng = np.random.default_rng(2)
    return Search(searchable(random_graph(rng, 3000, 30000)), NO_BEAM, ALL), random_scores(rng, 300)


def test_others_run_while_a_search_does() -> None:
    """This thread counts while another one searches within one call of C."""
    search, scores = slow_search()
    thread = threading.Thread(target=search.advance, args=(scores,))
    began = time.monotonic()
    thread.start()
    num_turns = 0
    while thread.is_alive():
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 20, time.monotonic() - began


def test_two_threads_search_one_graph() -> None:
    """Both find what one finds alone."""
    rng = np.random.default_rng(3)
    graph = searchable(random_graph(rng, 200, 2000))
    all_scores = [random_scores(rng, 200) for _ in range(2)]

    def found(scores: np.ndarray) -> bytes:
        search = Search(graph, 8.0, 100, 4.0)
        search.advance(scores)
        return search.end_lattice().tobytes()

    alone = [found(scores) for scores in all_scores]
    together: dict[int, bytes] = {}
    threads = [
        threading.Thread(target=lambda n=n: together.update({n: found(all_scores[n])}))
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[0], together[1]] == alone


def test_search_without_the_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_C", None)
    with pytest.raises(ValueError, match=r"search.c is not compiled: install a wheel .* compiler"):
        searchable(star(3))
