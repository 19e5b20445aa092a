"""Run every step, from speech to word error rates and a report.

megahour run --recipe recorded --run runs/mine --kaldi-dir /data/mine
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from infra.extras import how_to_install, lacking
from infra.log_lines import begin_log, elapsed_text, log, report_error
from infra.settings import AUTO, ConfigurationError
from infra.spark.session import spark_environment
from infra.store.object_store import PrefixError
from infra.supervisor import command_of, describe_end, shell_code
from jobs.cli.arguments import (
    CLUSTER_OPTIONS,
    INGEST_OPTIONS,
    KALDI_DIR,
    MANIFEST,
    SOURCE_OPTIONS,
    UNLABELLED_SPEAKERS,
    Parser,
    add_placement_arguments,
    add_recipe_arguments,
    add_run_arguments,
    add_source_arguments,
    given_options,
    names_labelled_alone,
    recipe_path,
    require_no_passwords,
    require_source_options,
)
from jobs.cli.megahour import CHECK
from jobs.run_table import (
    CERTIFY,
    GENERATE_TARGETS,
    INGEST,
    REALIGN,
    REPARTITION,
    STEPS,
    TRAIN_ALIGNER,
    TRAIN_STUDENT,
    TRAIN_TEACHER,
)
from pipeline.runs.names import EXTENDS, LABELLED_FROM
from training.settings.recipe import Recipe, read_recipe

JOBS = Path(__file__).parent
RUN = "run"
OF_UNLABELLED = (GENERATE_TARGETS, REPARTITION, TRAIN_STUDENT, CERTIFY)
WITHOUT_UNLABELLED = f"there is no {UNLABELLED_SPEAKERS}, and no {MANIFEST} of unlabelled speech"
EXIT_CODES = (
    "Exit codes: 0 done, 2 bad usage or recipe, 130 interrupted by Ctrl-C, 143 terminated; else "
    "that of the first step that failed, 128 + n where signal n killed it."
)


@dataclass(frozen=True)
class Launch:
    """Launch holds the command that starts a step's processes, and the arguments of its own."""

    step: str
    prefix: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    def command(self, shared: Sequence[str]) -> list[str]:
        """Return the whole command line."""
        return [*self.prefix, str(JOBS / f"{self.step}.py"), *shared, *self.arguments]


def launches(
    ingested: Sequence[str],
    supervised_ranks: int,
    student_ranks: int,
    device: str = AUTO,
    num_alignment_rounds: int = 1,
    num_target_rounds: int = 1,
    has_own_teacher: bool = False,
    inherits_models: bool = False,
    is_labelled_alone: bool = False,
) -> list[Launch]:
    """Return the steps in order, each with spark-submit, torchrun or Python before it.

    `ingested` are ingest's own options; without any the corpus is there. Each round of alignment or
    of targets after the first repeats two or three steps, which then do what has become due. A
    teacher of the user's own is not trained. A run that `inherits_models` trains the student alone,
    and one of labelled speech alone trains none.
    """
    prefixes = {
        "python": (sys.executable,),
        "Spark": (str(Path(sys.executable).parent / "spark-submit"),),
        "torchrun": (sys.executable,) if inherits_models else _torchrun(supervised_ranks),
    }
    found = {
        name: Launch(name, prefixes[step.starter], ("--device", device) if step.has_device else ())
        for name, step in STEPS.items()
    }
    found[TRAIN_STUDENT] = replace(found[TRAIN_STUDENT], prefix=_torchrun(student_ranks))
    prefix = prefixes["Spark" if MANIFEST in ingested else "python"]
    found[INGEST] = Launch(INGEST, prefix, tuple(ingested))
    if not {KALDI_DIR, MANIFEST} & {*ingested}:
        del found[INGEST]
    steps = [step for step in found if step != TRAIN_TEACHER or not has_own_teacher]
    if is_labelled_alone:
        num_target_rounds = 1
    for repeated, num_rounds in (
        ((TRAIN_ALIGNER, REALIGN), num_alignment_rounds),
        ((TRAIN_TEACHER, GENERATE_TARGETS, REPARTITION), num_target_rounds),
    ):
        place = steps.index(repeated[-1]) + 1
        steps[place:place] = repeated * (num_rounds - 1)
    left_out = OF_UNLABELLED if is_labelled_alone else ()
    return [found[step] for step in steps if step not in left_out]


def launches_of(
    arguments: argparse.Namespace, recipe: Recipe, ingested: Sequence[str]
) -> list[Launch]:
    """Return the steps of a recipe, on the ranks and devices that the command line names."""
    has_base = bool(arguments.extends or arguments.labelled_from)
    return launches(
        ingested,
        arguments.supervised_ranks,
        arguments.student_ranks,
        arguments.device,
        num_alignment_rounds=1 if has_base else recipe.alignment.rounds,
        num_target_rounds=recipe.targets.rounds,
        has_own_teacher=not recipe.num_teachers,
        # A later round's teacher learns from the run's own targets.
        inherits_models=has_base and recipe.targets.rounds == 1,
        is_labelled_alone=not has_base and names_labelled_alone(arguments),
    )


def _torchrun(num_ranks: int) -> tuple[str, ...]:
    # One restart, from the last checkpoint: gloo's rendezvous failed once in hundreds of starts.
    ranks = ("--nproc-per-node", str(num_ranks), "--max-restarts", "1")
    # "--": torchrun would take our --run for an abbreviation of its --run-path.
    launcher = "training.distributed.rank_launcher"
    return (sys.executable, "-m", launcher, "--standalone", *ranks, "--")


def run_steps(steps: Sequence[Launch], shared: Sequence[str]) -> int:
    """Run the steps one after the other; stop at the first that fails, with its exit code.

    A step that signal n killed has the exit code 128 + n.
    """
    started = time.monotonic()
    environment = spark_environment()
    for number, launch in enumerate(steps, 1):
        log(f"[{number}/{len(steps)}] {launch.step} ({elapsed_text(started)})", RUN)
        code = run_supervised(launch.command(shared), environment)
        if code:
            report_error(
                RUN,
                f"{launch.step} {describe_end(code)}: fix the cause, then give the same command "
                "again to resume here",
            )
            return shell_code(code)
    return 0


def chosen_steps(steps: Sequence[Launch], arguments: argparse.Namespace) -> list[Launch]:
    """Return the steps from --from on, of which --only names all that are to run."""
    names = [launch.step for launch in steps]
    for option, name in (("--from", arguments.first), *(("--only", n) for n in arguments.only)):
        if name and name not in names:
            whys = {
                INGEST: "no speech to ingest",
                TRAIN_TEACHER: "the recipe's teacher is your own",
            }
            raise ConfigurationError(f"{option} {name}: {whys.get(name, WITHOUT_UNLABELLED)}")
    first = names.index(arguments.first) if arguments.first else 0
    found = [each for each in steps[first:] if not arguments.only or each.step in arguments.only]
    if not found:
        # A scheduler would take a run of nothing for done.
        only = ", ".join(arguments.only)
        raise ConfigurationError(f"--only {only}: no step is left from --from {arguments.first} on")
    return found


def dry_run(steps: Sequence[Launch], shared: Sequence[str]) -> int:
    """List what each step would read and write, in plain processes; 1 if a recipe conflicts."""
    once = {launch.step: replace(launch, prefix=(sys.executable,)) for launch in steps}
    environment = spark_environment()
    codes = [
        shell_code(run_supervised([*launch.command(shared), "--dry-run"], environment))
        for launch in once.values()
    ]
    return max(codes, default=0)


def run_supervised(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command, all of whose processes end when this one ends, for whatever reason."""
    # In a group of its own, it survives a SIGKILL of this one's.
    process = subprocess.Popen(command_of(command), env=dict(environment), process_group=0)
    try:
        return process.wait()
    except BaseException:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the supervisor ends within seconds
        process.terminate()
        process.wait()
        raise


class _Terminated(KeyboardInterrupt):
    """_Terminated says that SIGTERM arrived."""


def exit_with(action: Callable[[], int]) -> None:
    """Exit with the code of `action`; on Ctrl-C and SIGTERM with one line, and 130 or 143."""

    def terminate(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        sys.exit(action())
    except (ConfigurationError, PrefixError) as error:
        report_error(RUN, error)
        sys.exit(2)
    except _Terminated:
        said, code = "terminated", 128 + signal.SIGTERM
    except KeyboardInterrupt:
        said, code = "interrupted", 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    report_error(RUN, f"{said}: the same command resumes")
    sys.exit(code)


def check(arguments: argparse.Namespace, *options: str) -> int:
    """Check recipe, clusters and ranks in a process of its own, which is quiet if all is well."""
    shared = shared_arguments(arguments.recipe, arguments)
    try:
        require_no_passwords([*shared, *options])  # others may see the command lines of processes
    except ConfigurationError as error:
        report_error(CHECK, error)
        return 2
    ranks = [
        *("--supervised-ranks", str(arguments.supervised_ranks)),
        *("--student-ranks", str(arguments.student_ranks)),
        *("--device", arguments.device),
    ]
    # Its own process: a model of the user's own imports torch, and this one lives as long.
    command = [sys.executable, str(JOBS / f"{CHECK}.py"), "--quiet", *ranks, *options]
    return shell_code(run_supervised([*command, *shared], spark_environment()))


def shared_arguments(recipe: str, arguments: argparse.Namespace) -> list[str]:
    """Return the arguments that every step receives."""
    given = given_options(arguments, ("--set", *CLUSTER_OPTIONS, EXTENDS, LABELLED_FROM))
    return ["--recipe", recipe, "--run", arguments.run, *given]


def main() -> None:
    """Parse the command line and run all steps."""
    parser = Parser(
        prog="megahour run",
        description="Run every step, each in its own processes, from a Kaldi data directory, from "
        "manifests, or, without either, from the corpus that is at corpus.uri, to word error rates "
        "and a report. The same command resumes an interrupted run.",
        epilog=EXIT_CODES,
    )
    add_recipe_arguments(parser)
    add_source_arguments(parser, required=False)
    add_placement_arguments(parser)
    add_run_arguments(parser)
    arguments = parser.parse_args()
    begin_log(RUN, arguments.log_format)
    exit_with(lambda: check_and_run(arguments))


def check_and_run(arguments: argparse.Namespace) -> int:
    """Check what the steps will need, then run them."""
    require_source_options(arguments)
    source = given_options(arguments, SOURCE_OPTIONS) or ["--ingested"]
    # Later steps alone may run where the corpus is gone.
    if arguments.kaldi_dir is None and (arguments.first or arguments.only):
        source = []
    if code := check(arguments, *source):
        return code
    recipe = read_recipe(recipe_path(arguments.recipe), arguments.set)
    ingested = given_options(arguments, INGEST_OPTIONS)
    steps = launches_of(arguments, recipe, ingested)
    if TRAIN_STUDENT not in {launch.step for launch in steps}:
        is_whole = arguments.manifest and not (arguments.first or arguments.only)
        if is_whole and recipe.models.normalization == "all":
            said = f"{WITHOUT_UNLABELLED}, and models.normalization = 'all'"
            raise ConfigurationError(f"{said}: add some, or set 'labelled' for this speech alone")
        log(f"{WITHOUT_UNLABELLED}: baseline and teacher alone are trained and scored", RUN)
    return run_chosen(steps, arguments)


def run_chosen(steps: Sequence[Launch], arguments: argparse.Namespace) -> int:
    """Run the steps that the command line chooses, or list what they would do."""
    chosen = chosen_steps(steps, arguments)
    if missing := lacking(extra for launch in chosen for extra in STEPS[launch.step].extras):
        raise ConfigurationError(f"steps need what is not installed: {how_to_install(missing)}")
    shared = shared_arguments(arguments.recipe, arguments)
    return dry_run(chosen, shared) if arguments.dry_run else run_steps(chosen, shared)


if __name__ == "__main__":
    main()
