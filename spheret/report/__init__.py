"""Reports: a pure function of run directories."""
