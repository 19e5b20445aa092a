"""Read and write whole objects in S3 and on local paths, within allowed prefixes."""
