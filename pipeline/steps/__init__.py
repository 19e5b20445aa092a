"""The data pipeline's steps (paper 003 IV-B): each distributes a local function over objects."""
