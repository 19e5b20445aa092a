"""Distributed trainers: who talks to whom, and when.

Each is a context manager around any `torch.nn.Module`, any `torch.optim.Optimizer` and an untouched
training loop. The gradients of all ranks are summed: see training/trainers/README.md.
"""

from training.trainers.bmuf import Bmuf, SparseLoco
from training.trainers.decentralized import AdPsgd, D1dPsgd, DPsgd, RandPsgd
from training.trainers.gtc import Gtc
from training.trainers.htm import Htm
from training.trainers.one_bit import OneBit
from training.trainers.synchronous import Synchronous
from training.trainers.trainer import Trainer

__all__ = [
    "AdPsgd",
    "Bmuf",
    "D1dPsgd",
    "DPsgd",
    "Gtc",
    "Htm",
    "OneBit",
    "RandPsgd",
    "SparseLoco",
    "Synchronous",
    "Trainer",
]
