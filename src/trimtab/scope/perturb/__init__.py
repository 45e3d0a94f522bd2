"""Disturbances inside the job: on activations, gradients, stored weights and communication."""
