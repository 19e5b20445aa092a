"""Share a host's devices among its Spark tasks, by one server process per device."""
