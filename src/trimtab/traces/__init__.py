"""Files to event tables and back: readers, writers, and jobs made up for tests."""
