"""Prompts of the user's, run through the model between training steps."""
