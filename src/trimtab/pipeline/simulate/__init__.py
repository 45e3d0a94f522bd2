"""Simulation of a pipeline: event driven, over the same plans, policies and memory guard that run real stages."""

from trimtab.pipeline.simulate.disturbance import Disturbance, parse
from trimtab.pipeline.simulate.engine import StuckError, simulate
from trimtab.pipeline.simulate.result import Ran, Result, Sent, Windows

__all__ = ["Disturbance", "Ran", "Result", "Sent", "StuckError", "Windows", "parse", "simulate"]
