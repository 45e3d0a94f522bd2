"""The collector: hears all ranks, agrees with them on when a change begins, records and passes on."""
