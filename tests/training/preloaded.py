"""What ranks have imported before they are forked; nothing else imports this."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # as tests.training.interpreted, before Triton is imported

import torch._dynamo  # noqa: F401 - optimizers import it when first made: 1.2 s in each rank

import training.trainers  # noqa: F401
