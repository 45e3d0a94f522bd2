"""What is computed of a tensor on its own device, so that only a little has to travel."""
