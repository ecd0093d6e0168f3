"""The page of a report: its tables, charts, scripts and files."""
