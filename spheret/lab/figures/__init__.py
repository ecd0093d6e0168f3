"""The figures of a page."""
