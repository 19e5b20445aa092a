"""Share proxies before S3 servers among the tests of faults."""

from tests.faults.proxied import impatient, server, start_proxy

__all__ = ["impatient", "server", "start_proxy"]
