"""HTTP and WebSocket in front of a collector or a recording."""
