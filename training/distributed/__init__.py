"""Exchanges between ranks: collectives, rendezvous, the failure detector, simulated ranks."""
