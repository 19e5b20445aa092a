"""Reach the world outside: object stores, configuration files, Spark, devices, torchrun."""
