"""trimtab as a callback of trainers that have them; a module a trainer, none of which imports another's library."""
