"""Distributed trainers: who talks to whom, and when.

Each is a context manager around any `torch.nn.Module`, any `torch.optim.Optimizer` and an untouched
training loop. The gradients of all ranks are summed: see training/README.md.
"""

from training.trainers.bmuf import Bmuf
from training.trainers.gtc import Gtc
from training.trainers.htm import Htm
from training.trainers.one_bit.one_bit import OneBit
from training.trainers.synchronous import Synchronous
from training.trainers.trainer import Trainer

__all__ = ["Bmuf", "Gtc", "Htm", "OneBit", "Synchronous", "Trainer"]
