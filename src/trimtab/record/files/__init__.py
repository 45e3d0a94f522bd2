"""From memory to disk: the ring, the writer's thread, and a rank's files over a long run."""
