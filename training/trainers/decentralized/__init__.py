"""Decentralized SGD (paper 001): each rank has a model of its own, and ranks average models."""

from training.trainers.decentralized.delayed_average import D1dPsgd, D1dPsgdConfig
from training.trainers.decentralized.pairwise_mixing import AdPsgd, AdPsgdConfig
from training.trainers.decentralized.ring_mixing import DPsgd, DPsgdConfig, RandPsgd, RandPsgdConfig

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
