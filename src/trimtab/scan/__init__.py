"""Scan: an event table becomes a verdict. Pure functions over values; nothing here imports torch."""

from trimtab.scan.analysis import Analysis, analyze
from trimtab.scan.model import Report

__all__ = ["Analysis", "Report", "analyze"]
