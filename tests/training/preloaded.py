"""Import what ranks, training steps and processes that synthesize need before they are forked.

Nothing else imports this.
"""

import os

os.environ["TRITON_INTERPRET"] = (
    "1"  # as tests.training.algorithms.gtc.interpreted, before Triton is imported
)

import hypothesis  # noqa: F401 - as pytest: what ranks run lies in files of tests
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401 - optimizers import it when first made: 1.2 s in each rank

import jobs.cli.training_steps  # boto3, pyarrow, scipy, Kaldi: 1.5 s in each rank
import jobs.synthesis.corpus  # noqa: F401 - 1 s in each process, which speaks one task
import training.trainers  # noqa: F401
