"""Readers of other programs' traces, one module (or package) each; they are registered in :mod:`trimtab.traces.read`.

A reader has two functions. ``recognizes(head)`` tells by the begin of a file (:class:`.heads.Head`) whether it is of
its format; ``read(files)`` makes one :class:`trimtab.traces.table.Trace` of all files that are, or raises ValueError in
one line.
"""
