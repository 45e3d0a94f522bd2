"""Training with forwards and backwards on processes of their own: plain PyTorch stages, over a transport."""
