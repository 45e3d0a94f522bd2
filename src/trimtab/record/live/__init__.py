"""What a rank says of itself while it runs, to a hub that is there: summaries, heartbeats, and answers to requests."""
