"""Throughputs that a plan rests on: published ones, and those of the machine at hand."""
