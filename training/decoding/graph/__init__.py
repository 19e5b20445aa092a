"""The decoding graph HCLG, built with OpenFst operations."""
