#!/usr/bin/env bash
# Makes everything that a release publishes, in dist/release, from a clean checkout:
#
#   lab/release.sh            sdist, wheel, wheel of plimsoll.inside, image with its digest, SBOM (SPDX), SHA256SUMS,
#                             and plimsoll-VERSION-offline.tar: all of it in one archive for a site without a network
#   lab/release.sh --dirty    the same from a checkout with changes, to try it
#
# BASE, TAG and PYTHON are those of lab/image.sh. Nothing is uploaded: .github/workflows/release.yml does that from a tag.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3.11}"
if [ "${1:-}" != --dirty ] && [ -n "$(git status --porcelain)" ]; then
  echo "release.sh: this checkout has changes; commit them, or pass --dirty to try" >&2
  exit 2
fi
version="$("$PYTHON" -c 'import re; print(re.search(r"__version__ = \"(.+)\"", open("src/plimsoll/__init__.py").read())[1])')"
tag="$(git describe --exact-match --tags 2>/dev/null || true)"
if [ -n "$tag" ] && [ "$tag" != "v$version" ]; then
  echo "release.sh: the tag is $tag, src/plimsoll/__init__.py says $version" >&2
  exit 2
fi
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}" # equal commits make equal archives
out=dist/release
rm -rf "$out"
mkdir -p "$out"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

export TAG="${TAG:-plimsoll:$version}" # for both calls: what is built is what is saved
BASE="${BASE:-}" bash lab/image.sh # leaves the wheels of plimsoll and all it needs in dist/image
"$PYTHON" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet hatchling
"$work/venv/bin/python" -m hatchling build --target sdist --directory "$out" 2>"$work/build.log" || { cat "$work/build.log" >&2; exit 3; }
cp dist/image/plimsoll_line-*.whl "$out"
"$work/venv/bin/pip" install --quiet --no-index --find-links dist/image plimsoll-line
"$work/venv/bin/plimsoll" inside wheel "$out" >/dev/null
created="$(date -u -d "@$SOURCE_DATE_EPOCH" +%Y-%m-%dT%H:%M:%SZ)"
"$PYTHON" -m lab.sbom dist/image "$version" "$created" >"$out/plimsoll-$version.spdx.json"
bash lab/image.sh save "$out/plimsoll-$version-image.tar"
"$PYTHON" - "$out/plimsoll-$version-image.tar" >"$out/image-digest.txt" <<'E2'
import json, sys, tarfile
print(json.load(tarfile.open(sys.argv[1]).extractfile("index.json"))["manifests"][0]["digest"])
E2
mkdir "$out/wheels"
cp dist/image/*.whl "$out/wheels"
(cd "$out" && find . -type f | sort | xargs sha256sum) >"$work/SHA256SUMS"
mv "$work/SHA256SUMS" "$out"
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$out" -cf "$work/offline.tar" .
mv "$work/offline.tar" "$out/plimsoll-$version-offline.tar"
echo "dist/release: plimsoll $version, image $(cat "$out/image-digest.txt")"
