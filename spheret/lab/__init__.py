"""The lab: run directories become rows, rows become one verdict, and a page and a sentence say it."""
