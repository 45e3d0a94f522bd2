"""The recorder: what runs inside the training job, on every rank."""
