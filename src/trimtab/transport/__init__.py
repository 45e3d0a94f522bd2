"""Tagged asynchronous point-to-point transport between the stages of a pipeline."""
