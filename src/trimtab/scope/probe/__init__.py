"""Prompts of the user's, run through the model between training steps: what would it say next?

``spec`` and ``merge`` are values and need no torch; the rest runs in the job.
"""
