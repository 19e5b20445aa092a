#!/bin/bash
# Give a host of Dataproc the credentials of S3, when the cluster starts. The secret, which the
# cluster's metadata names, holds a credentials file: [default], aws_access_key_id and so on.
set -euo pipefail
secret=$(/usr/share/google/get_metadata_value attributes/megahour-s3-secret)
install --directory --mode 755 /etc/megahour
umask 077
gcloud secrets versions access latest --secret "$secret" > /etc/megahour/s3_credentials
chown yarn: /etc/megahour/s3_credentials # drivers and executors are YARN's containers
