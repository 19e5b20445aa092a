"""Read and write S3, with bounded retries and with checks of every byte."""
