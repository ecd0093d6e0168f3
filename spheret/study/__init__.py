"""Studies: run directories in, tables, figures and one page out; the paper's numbers to stand beside them."""
