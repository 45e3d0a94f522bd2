"""Every communication of torch.distributed: seen at the dispatcher, followed to its end."""
