"""What the paper proves, measured on real models: Jacobians, certificates, the dynamics of the stream."""
