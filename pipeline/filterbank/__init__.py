"""64 log-mel energies of 25 ms windows every 10 ms (paper 003 II-B), by two engines."""
