"""The data pipeline: audio and metadata to training partitions (paper 003 IV)."""
