"""`spheret convert`: a model is converted and fine-tuned, and beside it the original.

It needs the lab, as every command. What lies above this folder needs torch and numpy alone.
"""
