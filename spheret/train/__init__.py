"""Training: one run, in one directory, which resumes bit for bit after a kill at any moment."""
