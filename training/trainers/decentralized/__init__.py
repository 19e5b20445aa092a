"""Decentralized SGD (paper 001): each rank has a model of its own, and ranks average models."""

from training.configuration.trainers import AdPsgdConfig, D1dPsgdConfig, DPsgdConfig, RandPsgdConfig
from training.trainers.decentralized.delayed_average import D1dPsgd
from training.trainers.decentralized.pairwise_mixing import AdPsgd
from training.trainers.decentralized.ring_mixing import DPsgd, RandPsgd

__all__ = [
    "AdPsgd",
    "AdPsgdConfig",
    "D1dPsgd",
    "D1dPsgdConfig",
    "DPsgd",
    "DPsgdConfig",
    "RandPsgd",
    "RandPsgdConfig",
]
