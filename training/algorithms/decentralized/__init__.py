"""Average models with neighbours: the matrices and updates of decentralized SGD (paper 001)."""
