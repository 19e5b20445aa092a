"""Say how each platform starts a step: a file a platform, with what its account file names."""
