"""`spheret convert`: fine-tune a converted model, and beside it the original."""
