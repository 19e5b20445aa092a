"""Read and write S3, with bounded retries, and with checks of whole bodies and listings."""
