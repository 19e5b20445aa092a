"""Proxies before S3 servers, for the tests of faults."""

from tests.faults.proxied import impatient, server, start_proxy

__all__ = ["impatient", "server", "start_proxy"]
