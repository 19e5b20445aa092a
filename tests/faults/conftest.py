"""Share proxies before S3 servers among the tests of faults."""

from tests.faults.failing_store.proxied import impatient, quick_retries, server, start_proxy

__all__ = ["impatient", "quick_retries", "server", "start_proxy"]
