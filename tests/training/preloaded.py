"""Import what ranks, and processes that synthesize, need before they are forked.

Nothing else imports this.
"""

import os

os.environ["TRITON_INTERPRET"] = (
    "1"  # as tests.training.algorithms.gtc.interpreted, before Triton is imported
)

import torch._dynamo  # noqa: F401 - optimizers import it when first made: 1.2 s in each rank

import training.trainers  # noqa: F401
