"""Many runs: the race of all schemes, and the reproduction of the paper."""
