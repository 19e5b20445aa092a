"""Exchange tensors between ranks: process group, collectives, failure detector, simulation."""
