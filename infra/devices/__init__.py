"""One server process for each device of a host, shared by the host's Spark tasks."""
