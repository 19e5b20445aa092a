"""Do what all trainers share: enter, wrap the optimizer's step, leave, and keep state.

Trainers report what they do as plain numbers that a loop may log (003 VI-C tunes by these), and
say by which rules another number of ranks takes over the state that they stored. At the end are the
trainer and the optimizer that a recipe names.
"""

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, Adam, AdamW, Optimizer

from infra.settings import TAG
from training.distributed import process_group
from training.distributed.checks import (
    Comparison,
    FiniteCheck,
    FirstFault,
    Replica,
    TensorDigests,
    compare,
)
from training.distributed.collectives import Traffic
from training.settings.trainers import AdamwConfig, OptimizerConfig, SgdConfig, TrainerConfig
from training.trainers.parameters import (
    FlatParameters,
    broadcast_buffers,
    broadcast_parameters,
    check_model,
    describe,
    find_fault,
)
from training.trainers.replica import (
    TrainedSet,
    check_only_trainer,
    check_optimizer,
    check_step,
    constant_parameters,
    hyperparameter_tensors,
    hyperparameters,
    refusing_other_optimizers,
    seeing_scalers,
    state_tensors,
)

Statistics: TypeAlias = dict[str, int | float]
"""Numbers of a trainer to log: those named num_ and bytes_ add up from step to step."""


def between(earlier: Statistics, later: Statistics) -> Statistics:
    """Return the statistics of the steps between two moments; norms are those of the later."""
    counts = [name for name in later if name.startswith(("num_", "bytes_"))]
    found = later | {name: later[name] - earlier[name] for name in counts}
    if "density" in later:
        found["density"] = density(found["num_elements_sent"], found["num_elements"])
    return found


def density(num_sent: int | float, num_elements: int | float) -> float:
    """Return the share of elements that were sent; 0 if there are none."""
    return num_sent / num_elements if num_elements else 0.0


def norm_of(values: Float[Tensor, " elements"]) -> float:
    """Return the Euclidean norm; the host waits for the device."""
    return float(torch.linalg.vector_norm(values))


State: TypeAlias = dict[str, Any]
"""One rank's whole state: "model", "optimizer", "trainer", "random", and a loop's own entries."""

EntryPath: TypeAlias = tuple[str | int, ...]
"""The keys that lead to an entry of a `State`; all tensors and numbers below them are meant."""

Rule: TypeAlias = Literal["mean", "sum", "stripe", "own", "shared"]


def _no_stripes(num_ranks: int) -> Sequence[int]:
    raise AssertionError(f"a plan without stripes was asked for those of {num_ranks} ranks")


@dataclass(frozen=True, slots=True)
class ReshardingPlan:
    """Say by which rule new ranks take over each entry; an entry without rule is shared.

    - "mean" is the mean over the models, each held by equally many consecutive ranks.
    - "sum" is a sum over ranks: new rank i of N' takes those of old ranks i, i + N', i + 2 N', ...
    - "stripe" is a rank's piece of one vector, in rank order: new ranks cut the whole at
      `stripe_bounds(N')`, N' + 1 indices from 0 to its length.
    - "own" means something on one rank alone: new ranks begin with zeros.
    - "shared" is the same on all ranks: old rank 0's is taken.
    """

    num_models: int = 1
    rules: Mapping[EntryPath, Rule] = field(default_factory=dict)
    stripe_bounds: Callable[[int], Sequence[int]] = _no_stripes


def fields_of(config: TrainerConfig) -> dict[str, Any]:
    """Return the fields of a trainer's settings: its keyword arguments."""
    return {each.name: getattr(config, each.name) for each in fields(config) if each.name != TAG}


def stored(config: TrainerConfig) -> dict[str, Any]:
    """Return a trainer's settings in plain values, as a checkpoint holds them."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    del plain[TAG]
    return plain


OptimizerHook: TypeAlias = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]

STEPS_BETWEEN_COMPARISONS = 32
"""A comparison reads the model once: 6.5 ms for 25 M parameters on a CPU core, so 0.2 ms a step."""


class Trainer:
    """Trainer is a context manager that makes `optimizer.step()` a step of all the group's ranks.

    Entering checks that the ranks agree, and starts all of them from rank 0's model. Every rank
    must then take the same number of steps, of this optimizer and the same tensors. Ranks that
    drift apart get a ValueError that names tensor and rank. Leaving gives all ranks the same model,
    the one to evaluate. Entering again resumes with the residuals and the block momentum that
    leaving kept; tensors that are trained since then begin with rank 0's weights, and with zeros.

    The keyword arguments beside `group` are the fields of the trainer's `record`, whose defaults
    are the papers' settings.
    """

    record: ClassVar[type[TrainerConfig]]
    keywords: ClassVar[Mapping[str, str]] = {}
    """Shorter keywords of the constructor, each with the record's field, which recipes name."""
    config: TrainerConfig

    def __init_subclass__(cls) -> None:
        # help() and editors show the record's fields as what they are: keyword arguments.
        if "record" in vars(cls):
            own = inspect.signature(Trainer.__init__).parameters
            named = [own[name] for name in ("model", "optimizer", "group")]
            settings = inspect.signature(cls.record).parameters
            short = {field: keyword for keyword, field in cls.keywords.items()}
            own_settings = [
                each.replace(name=short.get(name, name))
                for name, each in settings.items()
                if name != TAG
            ]
            cls.__signature__ = inspect.Signature([*named, *own_settings])  # type: ignore[attr-defined]

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        group: ProcessGroup,
        **settings: Any,  # noqa: ANN401 - the record declares them
    ) -> None:
        process_group.check_member(group)
        by_field = {self.keywords.get(name, name): value for name, value in settings.items()}
        if len(by_field) < len(settings):
            twice = [each for each in self.keywords.items() if set(each) <= settings.keys()]
            raise ValueError(f"{' and '.join(twice[0])} are the same setting: need one of them")
        self.config = self.record(**by_field)
        check_model(model)
        check_optimizer(optimizer)
        check_only_trainer(model, optimizer)
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.parameters = FlatParameters(model, optimizer)
        self.num_steps = 0
        self.is_cold = False
        """Whether rank 0 alone has data, as in a cold start; 1-bit SGD then quantizes nothing."""
        self._is_open = False
        self._trained = TrainedSet(model, optimizer)
        self._comparison: Comparison | None = None
        self._last_comparison = 0
        self._within = ExitStack()
        self._is_entered = False
        self._is_trial = False
        self._traffic = Traffic()
        self.set_up()

    def set_up(self) -> None:
        """Initialize the trainer's state from `self.config` and `self.parameters`."""
        self.forget_faults()

    def settings(self) -> dict[str, object]:
        """Name what must be equal on all ranks."""
        shared = {"num_steps": self.num_steps, "optimizer": hyperparameters(self.optimizer)}
        return shared | fields_of(self.config)

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return, by name, the trainer's tensors that are equal on all ranks at this moment."""
        return {f"parameter {name}": tensor for name, tensor in self.parameters.named.items()}

    def part_tensors(self) -> Mapping[str, Tensor]:
        """Return, by name, the tensors that are equal on the ranks of a `part` at this moment."""
        return {}

    @property
    def part(self) -> int:
        """Number this rank's part of the group."""
        return 0

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return, by name, what entering, leaving and saving also compare: the optimizer's state.

        It follows from gradients, which are summed, and is equal where they are.
        """
        return state_tensors(self.optimizer, self.parameters.named)

    def find_undone(self) -> str:
        """Return an error if leaving now would undo changes to the model, else an empty string."""
        return ""

    def groups(self) -> set[ProcessGroup]:
        """Return the groups whose traffic counts as the trainer's."""
        return {self.group}

    def is_comparison_due(self) -> bool:
        """Return whether ranks compare their replicas after the current step."""
        is_late = self.num_steps - self._last_comparison >= STEPS_BETWEEN_COMPARISONS
        return is_late and self.group.size() > 1

    def is_comparison_awaited(self) -> bool:
        """Return whether the current step checks the last comparison's result, if it is pending."""
        return True

    def exchange_gradients(self) -> None:
        """Turn this rank's gradients into those that its optimizer applies."""
        raise NotImplementedError

    def connect(self) -> None:
        """Make the process groups that the trainer needs besides its own."""

    def carry_over(self, old: FlatParameters) -> None:
        """Carry state over from the `old` parameters; newly trained tensors begin with zeros."""
        del old
        self.forget_faults()

    def begin(self) -> None:
        """Start from the model that all ranks now share."""

    def end_step(self) -> None:
        """Finish the step, after the optimizer's own."""

    def conclude(self) -> None:
        """Leave the model to be evaluated; raise what the last step's gradients call for."""
        self._finite.check()

    def set_evaluated(self) -> None:
        """Set the parameters to what `conclude` would leave, and change no other state."""

    def abandon(self) -> None:
        """Give up pending exchanges after an error."""

    def forget_faults(self) -> None:
        """Start checking for gradients that are not finite anew, on the model's present device."""
        self._fault = FirstFault(self.parameters.device)
        self._finite = FiniteCheck(self.group, self.parameters.device)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Train as trials of minibatch sizes do while the context lasts; the trainer is left.

        All ranks together raise FloatingPointError for the gradient of one, on leaving at the
        latest, so that all may resume from another state.
        """
        self._is_trial = True
        try:
            yield
        finally:
            self._is_trial = False

    def statistics(self) -> Statistics:
        """Return numbers to log; on a GPU the host waits for them, as no step does.

        `num_steps` are all steps of the training, `bytes_sent` what this process gave to exchanges.
        A message counts once, however many ranks receive it. Checks and checkpoints do not count.
        """
        return {"num_steps": self.num_steps, "bytes_sent": self._traffic.num_bytes}

    @torch.no_grad()
    def __enter__(self) -> "Trainer":
        if self._is_entered:
            raise RuntimeError("this trainer is entered already: leave it first")
        check_only_trainer(self.model, self.optimizer)
        if not self._is_open:
            self.renew_parameters()
        self._trained = TrainedSet(self.model, self.optimizer)
        # A rank with another learning rate would train without any error, and spoil every average.
        self._compare()
        self.connect()
        if not self._is_open:  # else a checkpoint from within: each rank has its own model
            broadcast_parameters(self.model, self.group)
            broadcast_buffers(self.model, self.group)
            self.begin()
        self._is_open = self._is_entered = True
        self._last_comparison = self.num_steps
        self._within.enter_context(self._watching_steps())
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # After an error the other ranks are elsewhere: an exchange would wait for them.
            if error is not None:
                self.abandon()
            elif self._is_open:
                try:
                    self.finish()
                except ValueError:  # ranks differ, and their exchanges are still under way
                    self.abandon()
                    raise
        finally:
            self._is_open = self._is_entered = False
            self._comparison = None
            self._within.close()

    @torch.no_grad()
    def finish(self) -> None:
        """Synchronize what a partial block left; the model becomes the one to evaluate."""
        if not (self._is_open and self._is_entered):
            raise RuntimeError("finish() twice, or outside of the trainer's with block")
        self._check_last_comparison()
        self._compare()
        with self._traffic.counting(self.groups()):
            self.conclude()
        # No equation averages buffers, so rank 0's replace all, as at the start.
        broadcast_buffers(self.model, self.group)
        self._is_open = False

    @contextmanager
    def evaluated_model(self) -> Iterator[None]:
        """Hold in the model what leaving now would leave; afterwards training goes on as without.

        All ranks call this together, between two steps, and must change nothing within. Its
        exchanges count as no traffic. Of blocks' changes that are sent by top-k the exact mean is
        taken, where leaving would send the largest. A trainer that is left changes nothing.
        """
        if not (self._is_open and self._is_entered):
            yield
            return
        with torch.no_grad():
            weights = self.parameters.weights()
            buffers = [each.clone() for each in self.model.buffers()]
            self.set_evaluated()
            broadcast_buffers(self.model, self.group)
        try:
            yield
        finally:
            with torch.no_grad():
                self.parameters.set_weights(weights)
                for buffer, own in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(own)

    def state_dict(self) -> dict[str, Any]:
        """Copy the whole state, without the model's and the optimizer's own.

        Mid-block, the models of the ranks differ: each rank must save all three. Raises
        FloatingPointError where the last step's gradients call for it.
        """
        self._finite.check()
        return {
            "trainer": type(self).__name__,
            "settings": stored(self.config),
            "num_steps": self.num_steps,
            "is_open": self._is_open,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; load the model and the optimizer too, then enter the trainer."""
        if self._is_entered:
            raise RuntimeError("load_state_dict() within the with block: load before entering")
        self.check_own_state(state)
        self.check_settings(state)
        self.renew_parameters()
        self.forget_faults()
        self.num_steps = state["num_steps"]
        self._is_open = state["is_open"]

    def replaceable_settings(self, state: Mapping[str, Any]) -> Collection[str]:
        """Name the settings that may differ from those of the checkpoint `state`."""
        del state
        return ()

    def check_settings(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError where the checkpoint `state` was written with other settings."""
        replaceable = self.replaceable_settings(state)
        for name, value in stored(self.config).items():
            before = state["settings"][name]
            if before != value and name not in replaceable:
                raise ValueError(
                    f"{name}: the checkpoint was written with {before!r}, this trainer has "
                    f"{value!r}: give the trainer {name}={before!r}, or load model and optimizer "
                    "alone to begin with other settings"
                )

    @classmethod
    def check_own_state(cls, state: dict[str, Any]) -> None:
        """Raise ValueError where `state` is another trainer's `state_dict()`."""
        if state["trainer"] != cls.__name__:
            raise ValueError(
                f"the checkpoint is of {state['trainer']}, this trainer is {cls.__name__}: "
                "load model and optimizer alone to begin with another trainer"
            )

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Return how other ranks take over the trainer's entries of rank 0's whole `state`."""
        del state
        return ReshardingPlan()

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """Close the trainer in a resharded whole state, as leaving it would; then it is entered."""
        return {**state, "trainer": {**state["trainer"], "is_open": False}}

    def renew_parameters(self) -> None:
        """Find the tensors that the optimizer trains now, and carry their state over."""
        parameters = FlatParameters(self.model, self.optimizer)
        if parameters.is_same(self.parameters):
            return
        old, self.parameters = self.parameters, parameters
        self.carry_over(old)

    @contextmanager
    def _watching_steps(self) -> Iterator[None]:
        # torch.compile around step() must leave exchanges to Python, so it skips these two.
        before: OptimizerHook = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
        after: OptimizerHook = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        hooks = [
            self.optimizer.register_step_pre_hook(before),
            self.optimizer.register_step_post_hook(after),
        ]
        try:
            with (
                refusing_other_optimizers(self.model, self.optimizer),
                seeing_scalers(self.optimizer),
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        check_step(optimizer, args, kwargs)
        if not self._is_open:
            raise RuntimeError("a step after finish(): leave the with block and enter it again")
        self._trained.check()
        self._trained.note_rates(self.num_steps + 1)
        if self.is_comparison_awaited():
            self._check_last_comparison()
        # Every trainer hands the optimizer summed gradients, so the papers' thresholds hold.
        with self._traffic.counting(self.groups()):
            self._finite.check()
            self.exchange_gradients()

    @torch.no_grad()
    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        del optimizer, args, kwargs
        self.num_steps += 1
        is_due = self.is_comparison_due()
        # A block's end replaces what the ranks of a part must share until then.
        of_part = self._digests(self.part_tensors() if is_due else {})
        with self._traffic.counting(self.groups()):
            self.end_step()
        if is_due:
            # This rank's checksum is sent now; the next step looks at those of all ranks.
            self._last_comparison = self.num_steps
            self._comparison = Comparison(self._replica({}, of_part), self.group)

    def replica(self) -> Replica:
        """Return what must be equal on ranks at this moment, for a checkpoint to compare."""
        of_part = self.part_tensors() if self._is_open else {}
        return self._replica(self.shared_state(), self._digests(of_part))

    def _compare(self) -> None:
        """Raise ValueError, on all ranks, if anything that must be equal differs."""
        problem = (
            self._trained.find_replaced(before_step=False)
            or find_fault(self.model)
            or self.find_undone()
        )
        claims = self.replica().claims(problem)
        if not problem:
            layout = describe(self.model, set(self.parameters.named))
            claims = replace(claims, settings={**layout, **claims.settings})
        compare(claims, self.group, self.parameters.device)

    def _check_last_comparison(self) -> None:
        comparison, self._comparison = self._comparison, None
        if comparison is not None:
            comparison.check()

    def _replica(self, more: Mapping[str, Tensor], of_part: TensorDigests) -> Replica:
        settings = {
            "trainer": type(self).__name__,
            "is_open": self._is_open,
            **self.settings(),
            **self.parameters.describe(),
            **self._trained.facts(),
        }
        tensors = {**hyperparameter_tensors(self.optimizer), **more}
        if self._is_open:
            constants = constant_parameters(self.model, self.optimizer)
            tensors |= {**self.shared_tensors(), **constants}
        return Replica(
            {name: str(value) for name, value in settings.items()},
            self._digests(tensors),
            self.part,
            of_part,
        )

    def _digests(self, tensors: Mapping[str, Tensor]) -> TensorDigests:
        return TensorDigests(tensors, self.parameters.device)


def make_trainer(
    config: TrainerConfig, model: nn.Module, optimizer: Optimizer, group: ProcessGroup
) -> Trainer:
    """Wrap model and optimizer; all ranks of `group` must call this together."""
    module, _, name = config.trainer.partition(":")
    trainer: type[Trainer] = getattr(import_module(module), name)
    return trainer(model, optimizer, group=group, **fields_of(config))


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make the optimizer of a recipe; the training loop sets its learning rate."""
    if isinstance(config, SgdConfig):
        return SGD(parameters, momentum=config.momentum, fused=True)
    betas = config.beta1, config.beta2
    if isinstance(config, AdamwConfig):
        decay = config.weight_decay
        return AdamW(parameters, betas=betas, eps=config.epsilon, weight_decay=decay, fused=True)
    return Adam(parameters, betas=betas, eps=config.epsilon, fused=True)
