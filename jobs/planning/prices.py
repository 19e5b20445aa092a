"""Price requests and storage; the prices of instances are in the cluster files."""

from dataclasses import dataclass

from jobs.planning.volumes.step_volume import Requests

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class StorePrices:
    """StorePrices holds US dollars for 1,000 requests of a kind, and for a gigabyte a month."""

    source: str
    put_per_1000: float
    list_per_1000: float
    get_per_1000: float
    head_per_1000: float
    gigabyte_month: float

    def requests(self, requests: Requests) -> float:
        """Return the dollars that these requests cost."""
        thousands = (
            requests.put * self.put_per_1000
            + requests.list * self.list_per_1000
            + requests.get * self.get_per_1000
            + requests.head * self.head_per_1000
        )
        return thousands / 1000

    def month(self, num_bytes: float) -> float:
        """Return the dollars that storing so many bytes for a month costs."""
        return num_bytes / GIGABYTE * self.gigabyte_month


S3_STANDARD = StorePrices(
    source="aws.amazon.com/s3/pricing, S3 Standard, us-east-1, list prices of 2025; "
    "storage at the rate above 50 TB",
    put_per_1000=0.005,
    list_per_1000=0.005,
    get_per_1000=0.0004,
    head_per_1000=0.0004,
    gigabyte_month=0.022,
)
