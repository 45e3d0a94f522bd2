"""Watch a running job: who is slow, who hangs, and what is done about it. Runs where you type, and needs no torch."""
