"""Count the objects, bytes, frames and requests of each step of a run."""
