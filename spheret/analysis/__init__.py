"""The paper's bounds, checked on real models: Jacobians, certificates and the dynamics of the stream."""
