"""Errors, files, the cache, the machine, progress: nothing in here knows about deep connections."""
