"""The sections of a page: paragraphs, tables and the names of figures."""
