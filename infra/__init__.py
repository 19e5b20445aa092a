"""What touches the world: objects in a store, configuration, Spark, devices."""
