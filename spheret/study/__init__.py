"""The lab: every contestant at its own best learning rate, with seeds, and the statistics to compare them."""
