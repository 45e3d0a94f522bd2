"""Token by token generation, with what the model thought of."""
