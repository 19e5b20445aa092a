"""Start Spark sessions, find them a Java, and pack the code that a cluster runs."""
