"""Training partitions to minibatches: sharding, batching, sub-epochs, the data cursor."""
