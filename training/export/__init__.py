"""Export models with explicit state, and recognize speech with them as it arrives."""
