"""How many objects, bytes, frames and requests each step of a run makes."""
