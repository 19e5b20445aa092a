#!/bin/sh
# Install what tests start besides Python: Ceph, sclite, Chromium and PortAudio, on Debian or
# Ubuntu, where they lack.
set -eu
if command -v radosgw > /dev/null && command -v ceph-mon > /dev/null &&
    command -v ceph-osd > /dev/null && command -v ceph > /dev/null &&
    { command -v chromium > /dev/null || command -v google-chrome > /dev/null; } &&
    { command -v sclite > /dev/null || [ -x /usr/lib/sctk/bin/sclite ]; } &&
    [ -n "$(find /usr/lib -name libportaudio.so.2 -print -quit)" ]; then
    exit 0
fi
as_root=
if [ "$(id -u)" != 0 ]; then
    as_root=sudo
fi
install() {
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install --yes --no-install-recommends \
        ceph-mon ceph-osd radosgw ceph-common sctk chromium libportaudio2
}
# The lists of packages may be missing or old: then fetch them, and try once more.
install || { $as_root apt-get update && install; }
