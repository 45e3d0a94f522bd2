"""See what happens inside a model that trains, and disturb it, without stopping the job.

Data flows one way: ``taps -> device statistics -> frames -> collector -> recording, server``. Here, and in
``recording``, ``collector``, ``server`` and ``commands``, nothing needs torch; ``taps``, ``device``, ``perturb``,
``probe`` and ``job`` run in the job.
"""
