"""S3: one client whose requests are repeated within bounds, whose bytes are checked."""
