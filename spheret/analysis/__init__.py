"""What the stream of a trained model does: its dynamics, the Jacobians of its updates, and what went wrong."""
