"""The commands below ``trimtab scope``."""
