"""One authenticated channel between the ranks of a job and whoever watches or steers it. Nothing here is pickled.

A :class:`~trimtab.control.hub.Hub` stands in the middle; everybody else is a client of it. Both are endpoints: they
publish on subjects, subscribe to them, request something of an endpoint by its name, and answer. Underneath is TCP, or
a shared directory where no port may be opened. docs/control.md has the threat model and the formats.
"""
