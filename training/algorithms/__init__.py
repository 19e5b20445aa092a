"""The tensor mathematics of the distributed trainers: GTC's messages and BMUF's block filter."""
