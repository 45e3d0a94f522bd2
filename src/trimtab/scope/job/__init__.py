"""A rank's side of scope: what is subscribed to is sampled, what is to be disturbed is, and the collector is told.

``session`` holds it together. On the training threads run ``switchboard`` (at step boundaries), ``relay`` and
``sampling`` (where tensors pass by); on the session's own thread ``courier`` with ``sending``, which empties
``outbox``; on the channel's thread ``answers`` and ``agreement``.
"""
