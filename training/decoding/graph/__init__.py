"""Build the decoding graph HCLG by OpenFst operations."""
