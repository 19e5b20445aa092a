"""Align by Kaldi's monophone mixtures (kaldi-hmm-gmm), in a process of their own.

python -m tests.benchmarks.kaldi_monophones FRAMES.npz TRANSCRIPTS.json PHONES.json: frames by
utterance id, {"lexicon": word to pronunciations, "words": utterance id to words, "phones": names,
silence first}; writes [[phone, first 10 ms frame], ...] by utterance id. Kaldi's train_mono recipe.
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kaldi_hmm_gmm as khg
import kaldifst
import numpy as np

NUM_ITERATIONS, TOTAL_GAUSSIANS, LAST_SPLIT = 30, 1000, 20
REALIGN = {*range(1, 11), 12, 14, 16, 18, 20, 23, 26, 29}
ACOUSTIC_SCALE, BEAM, RETRY_BEAM = 0.1, 10.0, 40.0
SILENCE_COST = -math.log(0.5)


class Monophones:
    """Monophones holds Kaldi's model of the phones, and each utterance's graph and alignment."""

    def __init__(self, frames: Mapping[str, np.ndarray], task: Mapping[str, Any]) -> None:
        self.frames = frames
        self.phones = {name: number + 1 for number, name in enumerate(task["phones"])}
        topology = khg.HmmTopology()
        topology.read(_topology(list(self.phones.values())))
        tree = khg.monophone_context_dependency(
            phones=list(topology.phones),
            phone2num_pdf_classes=topology.get_phone_to_num_pdf_classes(),
        )
        self.transitions = khg.TransitionModel(ctx_dep=tree, hmm_topo=topology)
        self.model = _standard_gaussians(tree.num_pdfs, next(iter(frames.values())).shape[1])
        words = {word: number + 1 for number, word in enumerate(sorted(task["lexicon"]))}
        compiler = khg.TrainingGraphCompiler(
            trans_model=self.transitions,
            ctx_dep=tree,
            lex_fst=_lexicon_fst(task["lexicon"], self.phones, words),
            disambig_syms=[],
            opts=khg.TrainingGraphCompilerOptions(),
        )
        self.graphs = {
            name: compiler.compile_graph_from_text([words[word] for word in task["words"][name]])
            for name in frames
        }
        self.paths = {name: self._equal(name) for name in frames}

    def _equal(self, name: str) -> list[int]:
        found, path = kaldifst.equal_align(
            ifst=self.graphs[name], length=len(self.frames[name]), rand_seed=3, num_retries=10
        )
        return kaldifst.get_linear_symbol_sequence(path)[1] if found else []

    def train(self) -> None:
        """Alternate Viterbi alignment and re-estimation, with more Gaussians up to a limit."""
        num_gaussians = self.model.num_pdfs
        step = (TOTAL_GAUSSIANS - num_gaussians) // LAST_SPLIT
        for iteration in range(NUM_ITERATIONS):
            if iteration in REALIGN:
                self.paths = {name: self._aligned(name) for name in self.frames}
            num_gaussians += step if iteration < LAST_SPLIT else 0
            self._reestimate(num_gaussians)

    def _aligned(self, name: str) -> list[int]:
        graph = self.graphs[name].copy()
        khg.add_transition_probs(
            trans_model=self.transitions, transition_scale=1.0, self_loop_scale=0.1, fst=graph
        )
        config = khg.AlignConfig()
        config.beam, config.retry_beam, config.careful = BEAM, RETRY_BEAM, False
        scores = khg.DecodableAmDiagGmmScaled(
            am=self.model, tm=self.transitions, feats=self.frames[name], scale=ACOUSTIC_SCALE
        )
        counters = {"num_done": 0, "num_error": 0, "num_retried": 0, "frame_count": 0}
        result = khg.align_utterance_wrapper(
            config=config,
            utt=name,
            acoustic_scale=ACOUSTIC_SCALE,
            fst=graph,
            decodable=scores,
            tot_like=0.0,
            **counters,
        )
        return result[5] if result[0] else []

    def _reestimate(self, num_gaussians: int) -> None:
        states = np.array(self.transitions.transition_id_to_pdf_array())
        statistics = khg.AccumAmDiagGmm()
        statistics.init(model=self.model, flags=khg.GmmUpdateFlags.kGmmAll)
        counts = self.transitions.init_stats()
        for name, path in self.paths.items():
            for frame, transition in zip(self.frames[name], path, strict=False):
                statistics.accumulate_for_gmm(
                    model=self.model, data=frame, gmm_index=int(states[transition]), weight=1.0
                )
            counts = counts + np.bincount(path, minlength=len(counts))
        self.transitions.mle_update(counts, khg.MleTransitionUpdateConfig())
        khg.mle_am_diag_gmm_update(
            config=khg.MleDiagGmmOptions(),
            amdiag_gmm_acc=statistics,
            flags=khg.str_to_gmm_flags("mvwt"),
            am_gmm=self.model,
        )
        occupancies = [statistics.get_acc(i).occupancy.sum() for i in range(statistics.num_accs)]
        self.model.split_by_count(
            state_occs=np.array(occupancies, np.float32),
            target_components=num_gaussians,
            perturb_factor=0.01,
            power=0.2,
            min_count=20.0,
        )

    def segments(self) -> Iterator[tuple[str, list[tuple[str, int]]]]:
        """Yield the phones of each utterance that could be aligned, with their first frames."""
        names = {number: name for name, number in self.phones.items()}
        for name, path in self.paths.items():
            starts = [
                index
                for index, transition in enumerate(path)
                if self.transitions.transition_ids_is_start_of_phone(transition)
                and not self.transitions.is_self_loop(transition)
            ]
            phones = [self.transitions.transition_id_to_phone(path[start]) for start in starts]
            if path:
                yield name, [(names[p], start) for p, start in zip(phones, starts, strict=True)]


def _topology(phones: list[int]) -> str:
    states = "".join(
        f"<State> {n} <PdfClass> {n} <Transition> {n} 0.75 <Transition> {n + 1} 0.25 </State>\n"
        for n in range(3)
    )
    entry = "<TopologyEntry>\n<ForPhones>\n{}\n</ForPhones>\n" + states
    entries = entry.format(" ".join(map(str, phones))) + "<State> 3 </State>\n</TopologyEntry>\n"
    return f"<Topology>\n{entries}</Topology>\n"


def _standard_gaussians(num_states: int, dimension: int) -> "khg.AmDiagGmm":
    gaussian = khg.DiagGmm(nmix=1, dim=dimension)
    gaussian.set_weights(np.ones(1, np.float32))
    gaussian.set_means(np.zeros((1, dimension), np.float32))
    gaussian.set_invvars(np.ones((1, dimension), np.float32))
    gaussian.compute_gconsts()
    model = khg.AmDiagGmm()
    for _ in range(num_states):
        model.add_pdf(gaussian)
    return model


def _lexicon_fst(
    lexicon: Mapping[str, list[list[str]]], phones: Mapping[str, int], words: Mapping[str, int]
) -> kaldifst.StdVectorFst:
    """Compile L: state 0 starts, 1 is between words, 2 takes silence after a word."""
    silence = next(iter(phones.values()))
    cost = SILENCE_COST
    lines = [f"0 1 0 0 {cost}", f"0 1 {silence} 0 {cost}", f"2 1 {silence} 0"]
    next_state = 3
    for word, variants in lexicon.items():
        for variant in variants:
            state = 1
            for index, phone in enumerate(variant):
                said = words[word] if index == 0 else 0
                if index + 1 < len(variant):
                    lines.append(f"{state} {next_state} {phones[phone]} {said}")
                    state, next_state = next_state, next_state + 1
                else:
                    lines += [f"{state} {end} {phones[phone]} {said} {cost}" for end in (1, 2)]
    fst = kaldifst.compile("\n".join([*lines, "1 0", ""]), acceptor=False)
    kaldifst.arcsort(fst, sort_type="olabel")
    return fst


def main(frames: str, task: str, result: str) -> None:
    """Train on all utterances, and write the phones of each."""
    with np.load(frames) as arrays:
        by_name = {name: arrays[name] for name in arrays.files}
    monophones = Monophones(by_name, json.loads(Path(task).read_text()))
    monophones.train()
    Path(result).write_text(json.dumps(dict(monophones.segments())))


if __name__ == "__main__":
    main(*sys.argv[1:])
