#!/usr/bin/env bash
# make image: builds the wheels of plimsoll and of all it needs into dist/image, then the image from them.
#
#   lab/image.sh                  with docker, podman or buildah, whichever is here
#   lab/image.sh save FILE        the image as an OCI archive, for podman load, skopeo copy, ctr image import
#   BASE=debian lab/image.sh      on a base that mmdebstrap makes from Debian's packages: no registry is asked
#
# TAG (plimsoll), BASE (python:3.11-slim-bookworm), PYTHON (python3.11, the version in BASE) and EXTRAS (simulate: with numpy, numba
# and the compiled scheduler) may be set. With BASE=debian, which
# CI takes, buildah runs in a chroot: no daemon, no user namespaces, no network while it builds.
set -euo pipefail
cd "$(dirname "$0")/.."
TAG="${TAG:-plimsoll}"
BASE="${BASE:-python:3.11-slim-bookworm}"
PYTHON="${PYTHON:-python3.11}"

if [ "$BASE" = debian ]; then
  export STORAGE_DRIVER="${STORAGE_DRIVER:-vfs}" BUILDAH_ISOLATION="${BUILDAH_ISOLATION:-chroot}"
  tools=buildah
else
  tools="docker podman buildah"
fi
tool=""
for each in $tools; do
  if command -v "$each" >/dev/null && { [ "$each" != docker ] || docker info >/dev/null 2>&1; }; then
    tool="$each"
    break
  fi
done
if [ -z "$tool" ]; then
  echo "image.sh: none of these can build here: $tools" >&2
  exit 3
fi
if [ "${1:-}" = save ]; then
  case "$tool" in
  buildah) buildah push --quiet "$TAG" "oci-archive:${2:?image.sh save FILE}" ;;
  podman) podman save --quiet --format oci-archive --output "${2:?image.sh save FILE}" "$TAG" ;;
  docker) docker save --output "${2:?image.sh save FILE}" "$TAG" ;;
  esac
  exit
fi

rm -rf dist/image
EXTRAS="${EXTRAS:+[$EXTRAS]}"
"$PYTHON" -m pip wheel --quiet --wheel-dir dist/image ".$EXTRAS" pip
if [ "$BASE" = debian ]; then
  work="$(mktemp -d)"
  trap 'rm -rf "$work"' EXIT
  # numpy and numba need the library of C++, which Debian's Python does without.
  mmdebstrap --quiet --variant=essential --include="python3,ca-certificates${EXTRAS:+,libstdc++6}" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$work/base.tar"
  base="$(buildah from scratch)"
  buildah add --quiet "$base" "$work/base.tar" / >/dev/null
  buildah commit --quiet --rm "$base" localhost/plimsoll-base >/dev/null
  BASE=localhost/plimsoll-base
fi
"$tool" build --quiet --build-arg "BASE=$BASE" --build-arg "EXTRAS=$EXTRAS" --tag "$TAG" .
