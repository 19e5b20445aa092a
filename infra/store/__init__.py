"""Objects in S3 and on local paths, confined to allowed prefixes, read whole or not at all."""
