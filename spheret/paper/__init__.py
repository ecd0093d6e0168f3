"""The paper, arXiv 2608.02668: its numbers, its recipe, what it leaves open, and `spheret reproduce`."""
