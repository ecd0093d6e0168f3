"""`spheret certify`: what is proven or measured of the Jacobians of a model, sublayer by sublayer."""
