"""Experiments that echo the papers' figures in minutes of a CPU. Each is a module to run: ``python -m experiments.NAME``."""
