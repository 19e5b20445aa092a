"""Read what the environment says of requests to S3, beside what boto3 reads there itself.

A setting's variable is AWS_ and the field's name in capitals. The names are boto3's, but for
AWS_S3_ADDRESSING_STYLE and AWS_REQUEST_PAYER: boto3 has none, django-storages and GDAL have these.
"""

import os
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from infra.settings import ConfigurationError, Text, read_record
from infra.store.objects import StoreError

Checksums = Literal["when_required", "when_supported"]


@dataclass(frozen=True, slots=True)
class S3Settings:
    """S3Settings holds a process's settings of S3; "" leaves one to the profile, then to boto3.

    `request_payer` agrees to pay for what a bucket's owner does not. Checksums are CRC32 of
    requests, where Content-MD5 is sent anyway, and those that stored objects have.
    """

    default_region: Annotated[
        str, Text(0, 63, r"((?!\d+$)[A-Za-z\d]([A-Za-z\d-]*[A-Za-z\d])?)?", "us-east-1")
    ] = ""
    s3_addressing_style: Literal["", "auto", "path", "virtual"] = ""
    request_payer: Literal["", "requester"] = ""
    request_checksum_calculation: Checksums = "when_required"
    response_checksum_validation: Checksums = "when_supported"

    @property
    def config(self) -> dict[str, Any]:
        """Return the arguments of botocore's Config that state these settings."""
        style = self.s3_addressing_style
        return {
            "request_checksum_calculation": self.request_checksum_calculation,
            "response_checksum_validation": self.response_checksum_validation,
            **({"s3": {"addressing_style": style}} if style else {}),
        }


def s3_settings() -> S3Settings:
    """Read the environment; StoreError names a variable that has no value it may have."""
    given = {}
    for field in fields(S3Settings):
        variable = f"AWS_{field.name.upper()}"
        if value := os.environ.get(variable):
            given[field.name] = value if field.name == "default_region" else value.lower()
            try:
                read_record(S3Settings, {field.name: given[field.name]}, variable)
            except ConfigurationError as error:
                raise StoreError(str(error)) from error
    return read_record(S3Settings, given, "environment")
