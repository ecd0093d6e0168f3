"""`spheret inspect`: one observation of a saved model, spheret's own or anybody's."""
