"""Open a run by fsspec, as pandas, pyarrow and notebooks do; jobs read and write by ObjectStore."""

import s3fs
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from infra.store.s3_settings import s3_settings
from infra.store.uris import is_s3, normalize_uri


def file_system(uri: str) -> AbstractFileSystem:
    """Return the file system that holds a URI: s3fs's, or that of local paths.

    s3fs gets credentials and endpoint as jobs do, and the settings of `S3Settings`. It neither
    confines its user to prefixes nor checks bytes.
    """
    if not is_s3(normalize_uri(uri)):
        return LocalFileSystem()
    settings = s3_settings()
    region = {"region_name": settings.default_region} if settings.default_region else {}
    return s3fs.S3FileSystem(
        requester_pays=bool(settings.request_payer),
        client_kwargs=region,
        config_kwargs=settings.config,
        default_cache_type="none",  # to read ahead fetched 56 MB of 77 for two narrow columns
        use_listings_cache=False,  # a run grows
        skip_instance_cache=True,  # the environment may be another one by now
    )
