#!/bin/sh
# Install what tests/ceph_server.py starts, on Debian or Ubuntu; does nothing where it is there.
set -eu
if command -v radosgw > /dev/null && command -v ceph-mon > /dev/null &&
    command -v ceph-osd > /dev/null && command -v ceph > /dev/null; then
    exit 0
fi
as_root=
if [ "$(id -u)" != 0 ]; then
    as_root=sudo
fi
install() {
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install --yes --no-install-recommends \
        ceph-mon ceph-osd radosgw ceph-common
}
# The lists of packages may be missing or old: then fetch them, and try once more.
install || { $as_root apt-get update && install; }
