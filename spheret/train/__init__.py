"""Training: one run, in one directory, which resumes to the bit after a kill at any moment."""
