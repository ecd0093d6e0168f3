"""Reports: a page, tables and figures as a pure function of run directories."""
