"""Find the ranks at fault after a failed exchange, and end a rank that a GPU holds up."""
