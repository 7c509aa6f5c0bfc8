"""Published examples run again: their protocols, and the table of numbers."""
